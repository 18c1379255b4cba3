"""From datasets to the three sample sets: which answers to ask for, which to keep."""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from specmill.conversations import Conversation
from specmill.generate import Job, greedy, sampled
from specmill.params import Prepare
from specmill.params_data import Dataset
from specmill.prompts import drop_bench_prompts, pick_bench, pick_training
from specmill.samples import Sample, keep_trainable
from specmill.sources import Reading, read_conversations
from specmill.templates import dataset_rows

logger = logging.getLogger(__name__)

SPLITS = ("train", "heldout", "bench")


@dataclass(frozen=True)
class Picked:
    """Conversations by what they are for, and how many rows came from where."""

    training: list[Conversation]
    heldout: list[Conversation]
    bench: list[Conversation]
    sources: dict[str, Any]


def pick_conversations(chosen: Prepare) -> Picked:
    """Read every dataset and pick; bench prompts are taken out of what trains and validates.

    Raises:
        ValueError: when a dataset cannot be read or has too few conversations.
    """

    def read(dataset: Dataset) -> Reading:
        return read_conversations(dataset, chosen.max_rows, strict=chosen.strict)

    measured = [read(dataset) for dataset in chosen.bench]
    bench = pick_bench(measured, chosen.bench_per_category, chosen.seed)
    readings = [read(dataset) for dataset in chosen.dataset]
    everything_measured = [one for reading in measured for one in reading.conversations]
    rows = [
        _counts(reading) | {"num_also_in_bench": drop_bench_prompts(reading, everything_measured)}
        for reading in readings
    ]
    training, heldout = pick_training(readings, chosen.limit, chosen.heldout, chosen.seed)
    return Picked(
        training,
        heldout,
        bench,
        {"dataset": rows, "bench": [_counts(reading) for reading in measured]},
    )


def _counts(reading: Reading) -> dict[str, Any]:
    return {
        "source": reading.dataset.source,
        "num_rows": reading.num_rows,
        "num_unusable": reading.num_unusable,
        "num_repeated": reading.num_repeated,
    }


def plan_jobs(picked: Picked, chosen: Prepare) -> list[Job]:
    """Every conversation the verifier answers: training ones as `chosen` says, the rest greedily.

    With `responses: dataset` the training conversations are not among them.
    """
    jobs: list[Job] = []
    if chosen.responses == "verifier":
        jobs += [("train", one, sampled(one, chosen)) for one in picked.training]
    jobs += [("heldout", one, greedy(chosen.max_tokens)) for one in picked.heldout]
    jobs += [("bench", one, greedy(chosen.max_tokens)) for one in picked.bench]
    return jobs


def dataset_samples(
    conversations: list[Conversation], tokenizer: Any, template_kwargs: dict[str, Any]
) -> tuple[list[list[Sample]], Counter[str]]:
    """Training samples from the dataset's own answers.

    Returns:
        The samples of each conversation that has any, and what was left out by reason.

    Raises:
        ValueError: when no turn can be used; names the template's fault, or that there is no
            answer in the dataset.
    """
    kept: list[list[Sample]] = []
    refused: Counter[str] = Counter(num_template_refused=0, num_without_answer=0)
    first_fault = None
    for conversation in conversations:
        if all(exchange.answer is None for exchange in conversation.exchanges):
            refused["num_without_answer"] += 1
            continue
        samples, counts, fault = dataset_rows(conversation, "train", tokenizer, template_kwargs)
        refused.update(counts)
        first_fault = first_fault or fault
        if samples:
            kept.append(samples)
    if not kept:
        raise ValueError(
            "prepare.responses is dataset, but no answer of it can be used: "
            f"{first_fault or 'it has questions only'}; set prepare.responses: verifier"
        )
    if refused["num_without_answer"]:
        logger.warning(
            "%d of %d training conversations have no answer in their dataset and are left out",
            refused["num_without_answer"], len(conversations),
        )  # fmt: skip
    if first_fault:
        logger.warning(
            "%d turns are left out; the first: %s", refused["num_template_refused"], first_fault
        )
    return kept, refused


def split_and_filter(
    conversations: list[list[Sample]], min_tokens: int, max_model_len: int
) -> tuple[dict[str, list[Sample]], dict[str, Any]]:
    """Sort answered conversations into splits.

    Training and held-out splits have one row per assistant turn and are filtered; bench has the
    last turn of every conversation, unfiltered: what is measured must not depend on the answers.

    Returns:
        Samples by split, and counts by split.

    Raises:
        ValueError: when nothing is left of a split.
    """
    turns: dict[str, list[Sample]] = {split: [] for split in SPLITS}
    for conversation in conversations:
        split = conversation[0].split
        turns[split] += conversation[-1:] if split == "bench" else conversation
    metrics: dict[str, Any] = {}
    for split in ("train", "heldout"):
        # extraction has the engine write one token more, which must fit too
        turns[split], counts = keep_trainable(turns[split], min_tokens, max_model_len - 1)
        metrics[split] = counts
    metrics["bench"] = {"num_kept": len(turns["bench"])}
    for split, samples in turns.items():
        if not samples:
            raise ValueError(_nothing_left(split, metrics[split], min_tokens, max_model_len))
        metrics[split]["num_tokens"] = sum(len(sample.input_ids) for sample in samples)
        metrics[split]["num_trained_tokens"] = sum(
            int(sample.loss_mask.sum()) for sample in samples
        )
    return turns, metrics


def _nothing_left(split: str, counts: dict[str, int], min_tokens: int, max_model_len: int) -> str:
    dropped = ", ".join(f"{name.removeprefix('num_')} {n}" for name, n in counts.items() if n)
    return (
        f"no {split} sample is left ({dropped or 'there was none'}): too short is less than "
        f"prepare.min_tokens ({min_tokens}), too long more than verifier.max_model_len "
        f"({max_model_len}); answers end at prepare.max_tokens"
    )

"""params.yaml as typed, frozen sections; an unknown key or a wrong type is an error.

YAML is read with ruamel (YAML 1.2), as DVC does: PyYAML reads the `5e-05` that
`dvc exp run -S train.lr=5e-5` writes as a string.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML, YAMLError

Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent type conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Verifier(Section):
    """The model whose output distribution is kept."""

    source: str
    """`wheel:PACKAGE` (the GGUF file in an installed package), `folder:PATH` or `hub:ORG/NAME`."""
    revision: str | None
    """Commit, tag or branch of a Hub model; None otherwise."""
    max_model_len: Count
    """Context length every engine is started with, in tokens."""

    @model_validator(mode="after")
    def _source_has_a_kind(self) -> "Verifier":
        kind, _, place = self.source.partition(":")
        if kind not in ("wheel", "folder", "hub") or not place:
            raise ValueError(
                f"source is {self.source!r}; write wheel:PACKAGE, folder:PATH or hub:ORG/NAME"
            )
        if self.revision is not None and kind != "hub":
            raise ValueError(f"revision is only for hub: sources, source is {self.source!r}")
        return self


class Prepare(Section):
    """On-policy samples: prompts answered by the verifier."""

    limit: Count | None
    """Training prompts to use, picked by hash from the file; None uses all."""
    heldout: Count
    """Prompts kept out of training for validation, picked by hash."""
    max_tokens: Count
    """Longest answer, in tokens."""
    min_tokens: Count
    """Shorter answers are dropped."""
    temperature: Annotated[float, Field(ge=0)]
    """Sampling temperature of training answers; held-out and bench answers are always greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    seed: Seed
    """Picks prompts and, mixed with each prompt, seeds its sampling."""


class Extract(Section):
    """Hidden states of every prepared sample."""

    aux_layer_ids: list[Size] | None
    """Depths fed to the draft model (specmill.layers); None takes EAGLE-3's default three."""
    shard_mib: Count
    """Size at which a shard of the store is closed, MiB."""


class Vocab(Section):
    """The draft vocabulary."""

    draft_vocab_size: Count
    """Number of verifier tokens the draft model can propose."""


class Train(Section):
    """EAGLE-3 training by speculators."""

    epochs: Count
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate. Muon's updates are scaled to AdamW's (`match_rms_adamw`), so one value
    serves both, as in speculators' command line."""
    optimizer: Literal["adamw", "muon"]
    """`muon` trains weight matrices with Muon and the rest with AdamW."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)]
    """Share of all steps spent warming the learning rate up; it then falls linearly to 0."""
    ttt_steps: Count
    """Steps unrolled by the training-time test (EAGLE-3, arXiv 2503.01840, section 3.2)."""
    ttt_step_loss_decay: Annotated[float, Field(gt=0, le=1)]
    """Weight of the loss of step i is this to the power i."""
    loss: str
    """A loss of speculators: kl_div, ce, tv, ..."""
    tokens_per_step: Count
    """Tokens packed into one optimizer step; longer samples are cut."""
    num_layers: Count
    """Decoder layers of the draft model."""
    sliding_window: Count
    """Attention window of the draft layers, in tokens."""
    norm_before_fc: bool
    """Normalise the concatenated aux hidden states (EAGLE-3.1)."""
    norm_output: bool
    """Feed normalised states from one TTT step to the next (EAGLE-3.1)."""
    seed: Seed


class NgramLookup(Section):
    """vLLM's prompt lookup: the window of tokens matched against what came before."""

    prompt_lookup_min: Count
    prompt_lookup_max: Count

    @model_validator(mode="after")
    def _window_is_ordered(self) -> "NgramLookup":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above "
                f"prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self


class Spec(Section):
    """What every speculating method shares; `none` does not read it."""

    tokens: Count
    """num_speculative_tokens (K), the headline value."""
    sweep: list[Count]
    """Further values of K to measure; each costs one engine start."""
    ngram: NgramLookup


class Bench(Section):
    """How the served verifier is measured."""

    concurrency: Annotated[list[Count], Field(min_length=1)]
    """Requests in flight (closed loop); one set of cells each."""
    requests: Count
    """Requests per category and concurrency; a cell sends at least one full wave."""
    max_tokens: Count
    """Longest answer, in tokens."""
    warmup_waves: Count
    """Unmeasured waves sent at each concurrency before the first cell."""
    rounds: Literal[1, 2]
    """1: reference, method. 2 adds the mirror: method, reference."""
    enforce_eager: bool
    """Serve uncompiled: only for quick tests, and the row says so."""

    @model_validator(mode="after")
    def _concurrency_is_a_set(self) -> "Bench":
        if len(set(self.concurrency)) != len(self.concurrency):
            raise ValueError(f"concurrency lists a value twice: {self.concurrency}")
        return self


class Method(Section):
    """One row of the comparison: a bench stage of its own."""

    section: Literal["bench", "spec"]
    """The params section this method depends on besides `bench`."""
    head: str
    """The artefact this method serves: a head's folder, or the verifier's identity."""


class Runtime(Section):
    """What cannot change a result; no stage depends on it."""

    cpu_kv_cache_gib: Count
    """KV cache of a CPU engine, GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    """Share of GPU memory an engine may take."""
    request_concurrency: Count
    """Requests in flight while answers are generated."""
    extract_batch: Count
    """Samples handed to the engine at a time by extract."""
    startup_timeout_s: Count
    """Longest time a server may take to become healthy."""
    request_timeout_s: Count
    """Longest time one request may take."""


class Params(Section):
    """All of params.yaml."""

    verifier: Verifier
    prepare: Prepare
    extract: Extract
    vocab: Vocab
    train: Train
    spec: Spec
    bench: Bench
    methods: dict[str, Method]
    runtime: Runtime

    def method(self, name: str) -> Method:
        """The entry of `methods` called `name`; raises ValueError when there is none."""
        if name not in self.methods:
            raise ValueError(f"methods has no {name!r}; it has {', '.join(self.methods)}")
        return self.methods[name]


def load_params(path: Path) -> Params:
    """Read and check `path`.

    Raises:
        ValueError: when it is not YAML; naming every key that is unknown, missing or wrong.
    """
    try:
        raw = YAML(typ="safe").load(path.read_text())
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"  {'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            + (f" (got {item['input']!r})" if item["type"] != "missing" else "")
            for item in error.errors()
        ]
        raise ValueError(f"{path} is not valid:\n" + "\n".join(lines)) from None

"""params.yaml as typed, frozen sections; an unknown key or a wrong type is an error.

The text under each key is its description in docs/params.md.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from specmill.params_bench import Bench
from specmill.params_curves import Curves
from specmill.params_data import Datasets, TemplateArguments
from specmill.params_experts import Experts
from specmill.params_heads import (
    LIKE_VERIFIER,
    Draft,
    DraftModel,
    ForeignHead,
    HeadType,
    Medusa,
    OutsideHead,
    Sibling,
    SpoiledHead,
    StartHead,
)
from specmill.params_imported import Imported, check_names
from specmill.params_parallel import Parallel
from specmill.params_scheduled import Scheduled, check_scheduled
from specmill.params_urls import Endpoints, TrackingUri
from specmill.section import Count, Name, Section, Seed, Size

TRAINED_HEAD = "models/eagle3"


class Verifier(Section):
    """The model whose output distribution is kept."""

    source: str
    """`wheel:PACKAGE` (the GGUF file in an installed package), `folder:PATH` or `hub:ORG/NAME`."""
    revision: str | None
    """Commit, tag or branch of a Hub model; null otherwise."""
    max_model_len: Count
    """Context length every engine is started with, in tokens."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    """What it computes in. `auto` takes the checkpoint's own (bfloat16 of a GGUF file), and float32
    on a CPU that has no instructions for 16-bit floats and would be about eight times as slow."""
    trust_remote_code: bool = False
    """Run code that the model's repository brings, as some tokenizers are (docs/reliability.md):
    here and in every engine, with all your rights. The fingerprint then covers it."""
    experts: Experts | None = None
    """Re-lay the model as a mixture of experts; null takes it as it is."""

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

    dataset: Datasets
    """Conversations to train on and to hold out: one source, or a list of datasets to mix."""
    bench: Datasets
    """Prompts to measure with: one source or a list. Never trained on."""
    bench_per_category: Count
    """Bench prompts to answer per category, picked by hash (bench.requests says how many a cell
    sends)."""
    max_rows: Count | None
    """Rows read from the start of each dataset; null reads all. The rest is not downloaded."""
    responses: Literal["verifier", "dataset"]
    """Who answers training prompts: the verifier itself (on-policy) or the dataset. The verifier
    always answers held-out and bench prompts."""
    strict: bool
    """Whether a row that is no conversation, or outgrows the context, ends the run; false leaves it
    out with a count."""
    limit: Count | None
    """Training prompts to use, picked by hash; null uses all."""
    heldout: Count
    """Prompts kept out of training for validation, picked by hash."""
    max_tokens: Count
    """Longest answer of the verifier, in tokens."""
    min_tokens: Count
    """Shorter answers are dropped."""
    temperature: Annotated[float, Field(ge=0)]
    """Sampling temperature of training answers; held-out and bench answers are always greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Nucleus of training answers, when they are sampled."""
    top_k: Size
    """Most likely tokens to sample training answers from; 0 takes all."""
    min_p: Annotated[float, Field(ge=0, le=1)]
    """Least probability of a sampled token relative to the most likely one; 0 takes all."""
    chat_template_kwargs: TemplateArguments
    """Passed to the verifier's chat template, e.g. enable_thinking: false."""
    seed: Seed
    """Picks prompts and, mixed with each prompt, seeds its sampling."""

    @model_validator(mode="after")
    def _weights_have_a_total(self) -> "Prepare":
        if self.limit is None and len({dataset.weight for dataset in self.dataset}) > 1:
            raise ValueError("weights need a limit: they are shares of prepare.limit")
        return self


class Extract(Section):
    """Hidden states of every prepared sample."""

    aux_layer_ids: list[Size] | None
    """Depths fed to the draft model (specmill.layers); null takes EAGLE-3's default three."""
    dtype: Literal["auto", "fp8_e4m3"]
    """What states are kept as: `auto` as they are computed, `fp8_e4m3` in half the bytes."""
    mode: Literal["store", "online"]
    """`online` keeps nothing: training asks the server in runtime.extract_endpoints."""
    shard_mib: Annotated[int, Field(ge=1, le=16384)] = 512
    """Size at which a shard of the store is closed, MiB."""


class Vocab(Section):
    """The draft vocabulary."""

    draft_vocab_size: Count
    """Number of verifier tokens the draft model can propose."""


class Train(Section):
    """Training of an EAGLE-3 head, or of a sibling of it, by speculators."""

    type: HeadType
    """What is trained (specmill.draft_types); the method of the same name serves it."""
    draft: Draft = LIKE_VERIFIER
    """EAGLE-3: what it looks like. `like-verifier`, `kimi-k2-eagle3`, or `file:PATH` of a JSON file
    with a Llama's config or a head's (docs/draft-model.md)."""
    from_: StartHead = Field(default=None, alias="from")
    """EAGLE-3: the head to go on from, `folder:PATH` or `hub:ORG/NAME`, or keys as in `heads`; null
    starts with random weights. The vocabulary mapping is then that head's."""
    epochs: Count
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate; Muon's updates are scaled to AdamW's, so one value serves both."""
    optimizer: Literal["adamw", "muon"]
    """`muon` trains weight matrices with Muon and the rest with AdamW."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)]
    """Share of all steps spent warming the learning rate up; it then falls linearly to 0."""
    ttt_steps: Count
    """Tokens it learns to draft, which is the largest K; of EAGLE-3 the steps unrolled by the
    training-time test (arXiv 2503.01840, section 3.2)."""
    ttt_step_loss_decay: Annotated[float, Field(gt=0, le=1)]
    """EAGLE-3: weight of the loss of step i is this to the power i."""
    loss: Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"]
    """A loss of speculators (losses/utils.py)."""
    max_samples: Count | None
    """Training samples to use, the first of the file; null uses all. Only their hidden states are
    read, so a node that has pulled a part can try itself out (docs/rented-node.md)."""
    tokens_per_step: Count
    """Tokens packed into one optimizer step; longer samples are cut."""
    num_layers: Count
    """Decoder layers of the draft model."""
    sliding_window: Count | None
    """Attention window of the draft layers, in tokens; null lets them see everything."""
    norm_before_fc: bool
    """Normalise the concatenated aux hidden states (EAGLE-3.1, P-EAGLE)."""
    norm_output: bool
    """EAGLE-3: feed normalised states from one TTT step to the next (EAGLE-3.1)."""
    seed: Seed
    """Of the draft model's first weights and the order of samples."""

    @model_validator(mode="after")
    def _only_eagle3_has_a_shape_or_a_start(self) -> "Train":
        given = {"draft": self.draft != LIKE_VERIFIER, "from": self.from_ is not None}
        if self.type != "eagle3" and any(given.values()):
            wrong = ", ".join(key for key, is_given in given.items() if is_given)
            raise ValueError(f"type is {self.type}, and {wrong} is for eagle3 alone")
        return self

    def of_its_own(self, **changes: Any) -> "Train":
        """The training of another head: shaped like the verifier, from random weights."""
        fresh = {"draft": LIKE_VERIFIER, "from_": None}
        return self.model_copy(update=fresh | changes)


class Spec(Section):
    """What every speculating method shares; `none` does not read it."""

    tokens: Count
    """num_speculative_tokens (K), the headline value."""
    sweep: list[Count]
    """Further values of K to measure; each costs one engine start."""


class Method(Section):
    """One row of the comparison: a bench stage of its own, called what its entry is called."""

    method: str
    """How it is served: a file of specmill/methods."""
    section: Literal["bench", "spec"]
    """The params section this row depends on besides `bench` and its own entry."""
    head: str
    """The artefact it serves: a head's folder, or the verifier's identity where there is none."""
    settings: Annotated[dict[str, Any], Field(default_factory=dict)]
    """What else the method can be told; its file says what."""

    @field_validator("section")
    @classmethod
    def _follows_from_the_method(cls, section: str, known: ValidationInfo) -> str:
        """DVC has to find it written: by a wrong one a bench would not see that K has changed."""
        method = known.data.get("method")
        right = "bench" if method == "none" else "spec"
        if section != right:
            raise ValueError(f"a row of method {method} has section: {right}")
        return section


class Runtime(Section):
    """What cannot change a result; no stage depends on it."""

    cpu_kv_cache_gib: Count
    """KV cache of a CPU engine, GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    """Share of GPU memory an engine may take."""
    request_concurrency: Count
    """Requests in flight at each engine while answers are generated."""
    prepare_engines: Count
    """Engines that prepare starts for the answers; more of them than there are GPUs share them,
    which pays where one is held up by its own Python (a small verifier)."""
    extract_window: Count
    """Tokens under way at an engine in extract, asked for and not yet in a shard being filled."""
    extract_endpoints: Endpoints
    """Running servers that share the extraction (specmill.serve_states); [] starts one here."""
    extract_engines: Count
    """Engines that extract starts on this machine where no endpoints are given; more of them than
    there are GPUs share them."""
    train_processes: Count
    """Processes that share each step of train and train_sibling, one GPU each; torchrun by hand
    says it itself (docs/several-gpus.md)."""
    data_workers: Size
    """Processes that read training samples, of each of them; 0 reads between two steps."""
    startup_timeout_s: Count
    """Longest time a server may take to become healthy."""
    request_timeout_s: Count
    """Longest time one request may take."""
    tracking_uri: TrackingUri
    """MLflow server (MLFLOW_TRACKING_URI wins); null keeps mlflow.db beside dvc.yaml."""
    register_head: str | None
    """Name in MLflow's model registry to register the head under; null registers nothing."""


class Params(Section):
    """All of params.yaml."""

    verifier: Verifier
    prepare: Prepare
    extract: Extract
    parallel: Parallel
    vocab: Vocab
    train: Train
    siblings: dict[Name, Sibling]
    medusa: dict[Name, Medusa]
    draft_models: dict[Name, DraftModel]
    heads: dict[Name, OutsideHead]
    foreign_heads: dict[Name, ForeignHead]
    spoiled_heads: dict[Name, SpoiledHead]
    spec: Spec
    bench: Bench
    curves: Curves
    methods: Annotated[dict[Name, Method], Field(min_length=1)]
    scheduled: Annotated[dict[Name, Scheduled], Field(default_factory=dict)]
    imported: dict[Name, Imported]
    runtime: Runtime

    @model_validator(mode="after")
    def _rows_have_names_of_their_own(self) -> "Params":
        check_names(self.imported, self.methods)
        served = {name: (row.method, row.head) for name, row in self.methods.items()}
        check_scheduled(self.scheduled, served, {*self.methods, *self.imported})
        return self

    @model_validator(mode="after")
    def _k_can_be_drafted(self) -> "Params":
        k = max([self.spec.tokens, *self.spec.sweep])
        if k >= self.bench.max_tokens:
            raise ValueError(
                f"spec.tokens or spec.sweep asks for {k} draft tokens, but an answer of the bench "
                f"has at most {self.bench.max_tokens} (bench.max_tokens)"
            )
        trained = any(method.head == TRAINED_HEAD for method in self.methods.values())
        if trained and k > self.train.ttt_steps:
            raise ValueError(
                f"spec.tokens or spec.sweep asks for {k} draft tokens, but the head is trained for "
                f"{self.train.ttt_steps}: raise train.ttt_steps (trains again) or lower it"
            )
        return self

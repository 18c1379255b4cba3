"""What is called or overridden of vLLM, speculators and their companions, and whether it is there.

None of it is a public interface, and each was another in some version. `drift` compares the table
with what is installed: a parameter that is gone, one that is needed now, an attribute that no
method names any more. It runs no engine; it says in a minute what a stage says after an hour.

Run      python -m specmill.signatures [ARCHITECTURE]     (JSON; `make doctor` reads it)

ARCHITECTURE is a class of a config.json. The answer has `drift`, `serves` (does vLLM know it),
`hands_states_out` (can aux hidden states be taken from it), `quantisations` (names that vLLM knows)
and `import_s`, the seconds that importing vLLM took.
"""

import argparse
import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from specmill import compat


@dataclass(frozen=True)
class Use:
    """One thing of another package that is used here."""

    place: str
    """`module:name`, or `module:Class.method`."""
    user: str
    """The file that uses it."""
    passed: tuple[str, ...] | None = None
    """Parameters that it is called with, in any way; None where it is not called from here."""
    overridden: bool = False
    """Whether a subclass here stands before it: it must take `passed` and nothing else."""
    named: tuple[str, ...] = ()
    """Attributes of its instances that are read or set here."""
    cpu_only: bool = False
    """Whether nothing on a GPU uses it."""


_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_TRAIN = "speculators.train"
_MODELS = "speculators.models"
_SUFFIX = "arctic_inference.suffix_decoding"

USES = (
    Use(
        f"{_CONNECTOR}:ExampleHiddenStatesConnector", "connector.py",
        passed=("vllm_config", "role", "kv_cache_config"),
        named=("_kv_cache", "_block_size", "_is_tp_rank_zero", "_lock_fds", "_executor",
               "_req_copy_events", "_req_futures", "_kv_transfer_config", "_get_copy_stream",
               "has_connector_metadata", "_get_connector_metadata"),
    ),
    Use(f"{_CONNECTOR}:ExampleHiddenStatesConnector.build_connector_meta", "connector.py",
        ("scheduler_output",), overridden=True),
    Use(f"{_CONNECTOR}:ExampleHiddenStatesConnector.get_finished", "connector.py",
        ("finished_req_ids",), overridden=True),
    Use(f"{_CONNECTOR}:ExampleHiddenStatesConnector._on_write_done", "connector.py",
        ("req_id", "future")),
    Use(f"{_SCHEDULER}:Scheduler", "steered.py",
        named=("dynamic_sd_lookup", "num_spec_tokens", "requests", "scheduler_config"),
        cpu_only=True),
    Use(f"{_SCHEDULER}:Scheduler.schedule", "steered.py", (), cpu_only=True),
    Use(f"{_SCHEDULER}:Scheduler.update_draft_token_ids", "steered.py", ("draft_token_ids",),
        overridden=True, cpu_only=True),
    Use("vllm.v1.spec_decode.custom_class_proposer:create_custom_proposer", "fixed_drafter.py"),
    Use("vllm.v1.spec_decode.ngram_proposer:_find_longest_matched_ngram_and_propose_tokens",
        "proposers.py", ("origin_tokens", "min_ngram", "max_ngram", "max_model_len", "k")),
    Use("vllm.model_executor.layers.fused_moe.routed_experts_capturer:"
        "bind_routed_experts_capturer", "routed_worker.py", ("model", "capturer"), cpu_only=True),
    Use("vllm.engine.arg_utils:EngineArgs", "engines.py",
        ("model", "gpu_memory_utilization", "disable_log_stats", "dtype", "max_model_len",
         "max_num_batched_tokens", "enforce_eager", "enable_prefix_caching",
         "enable_chunked_prefill", "speculative_config", "kv_transfer_config", "scheduler_cls",
         "generation_config", "served_model_name", "trust_remote_code", "worker_extension_cls",
         "enable_return_routed_experts")),
    Use("vllm:LLM", "engines.py", ("model", "gpu_memory_utilization", "disable_log_stats")),
    Use("vllm:SamplingParams", "engines.py", ("max_tokens", "temperature", "detokenize")),
    Use("vllm.v1.engine.llm_engine:LLMEngine", "engines.py",
        named=("engine_core", "step", "has_unfinished_requests", "collective_rpc")),
    Use("vllm.v1.engine.llm_engine:LLMEngine.add_request", "engines.py",
        ("request_id", "prompt", "params")),
    Use("vllm.v1.engine.exceptions:EngineDeadError", "engines.py"),
    Use("vllm.config:SpeculativeConfig", "proposers.py", ("method", "model",
        "num_speculative_tokens", "num_speculative_tokens_per_batch_size",
        "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob")),
    Use(f"{_TRAIN}.trainer:Trainer", "training.py",
        ("model", "config", "train_loader", "val_loader"),
        named=("checkpointer", "local_rank", "device_type")),
    Use(f"{_TRAIN}.trainer:Trainer.setup_trainer", "training.py", (), overridden=True),
    Use(f"{_TRAIN}.trainer:Trainer.train_epoch", "training.py", ("epoch", "step_callback")),
    Use(f"{_TRAIN}.trainer:Trainer.val_epoch", "training.py", ("epoch",), overridden=True),
    Use(f"{_TRAIN}.trainer:Trainer.maybe_update_best", "training.py", ("epoch", "val_metrics"),
        overridden=True),
    Use(f"{_TRAIN}.trainer:Trainer.run_training.__wrapped__", "training.py", ("self",)),
    Use(f"{_TRAIN}.trainer:TrainerConfig", "training.py",
        ("lr", "num_epochs", "save_path", "resume_from_checkpoint", "train_call_kwargs",
         "val_call_kwargs", "optimizer", "muon_lr", "scheduler_type", "scheduler_warmup_ratio",
         "hidden_states_dtype")),
    Use(f"{_TRAIN}.checkpointer:SingleGPUCheckpointer", "training.py", ("path",)),
    Use(f"{_TRAIN}.checkpointer:SingleGPUCheckpointer.save_checkpoint", "training.py",
        ("model", "optimizer", "epoch", "float_dtype")),
    Use(f"{_TRAIN}.checkpointer:SingleGPUCheckpointer.update_best_symlink", "training.py",
        ("epoch",)),
    Use(f"{_TRAIN}.checkpointer:get_current_device", "compat.py", (), overridden=True),
    Use(f"{_TRAIN}.cli:create_transformer_layer_config", "draft_decoder.py",
        ("verifier_name_or_path", "num_layers", "draft_arch", "hidden_act", "sliding_window",
         "full_attention_indices")),
    Use(f"{_TRAIN}.data:CollateFn", "shares.py",
        ("max_len", "hidden_size", "num_target_layers", "dtype", "preprocess")),
    Use(f"{_TRAIN}.distributed_batch_sampler:MultipackDistributedBatchSamplerV2", "shares.py",
        ("batch_max_length", "lengths", "num_replicas", "rank", "seed")),
    Use(f"{_TRAIN}.distributed:get_rank", "shares.py", ()),
    Use(f"{_TRAIN}.distributed:get_world_size", "shares.py", ()),
    Use(f"{_TRAIN}.distributed:maybe_setup_distributed", "distributed.py", ()),
    Use(f"{_TRAIN}.distributed:maybe_destroy_distributed", "distributed.py", ()),
    Use(f"{_TRAIN}.recovery:RECOVERY_METADATA_KEY", "shares.py"),
    Use(f"{_TRAIN}.data:ArrowDataset", "transfer.py",
        ("max_len", "datapath", "transfer", "vllm_endpoint", "on_missing", "hidden_states_dtype",
         "request_timeout")),
    Use(f"{_TRAIN}.data:ArrowDataset._setup_client", "transfer.py", (), overridden=True),
    Use(f"{_TRAIN}.data:ArrowDataset._get_raw_data", "transfer.py", ("index",), overridden=True),
    Use(f"{_TRAIN}.recovery:SampleUnavailable", "transfer.py", named=("reason",)),
    Use("hs_connectors:HiddenStatesTransfer", "transfer.py", ()),
    Use("hs_connectors:HiddenStatesTransfer.get_cached", "transfer.py", ("file_idx",),
        overridden=True),
    Use("hs_connectors:HiddenStatesTransfer.get_generated", "transfer.py",
        ("hs_transfer_params",), overridden=True),
    Use("hs_connectors:HiddenStatesTransfer.delete", "transfer.py", ("handle",), overridden=True),
    Use("hs_connectors:HiddenStatesBackend.from_train_args", "transfer.py",
        ("args", "data_path")),
    Use("speculators.cli:app", "transfer.py"),
    Use(f"{_TRAIN}.vocab_mapping:build_vocab_mappings_from_distribution", "vocab.py",
        ("token_freq_dict", "draft_vocab_size", "target_vocab_size")),
    Use(f"{_MODELS}.eagle3.core:Eagle3DraftModel.from_training_args", "draft_types.py",
        ("verifier_config", "t2d", "d2t", "target_layer_ids", "draft_vocab_size")),
    Use(f"{_MODELS}.eagle3.core:Eagle3DraftModel.forward", "offline.py",
        ("hidden_states", "input_ids", "document_ids", "position_ids", "ttt_steps")),
    Use(f"{_MODELS}.eagle3.data:shift_batch", "draft_types.py", ("batch",)),
    Use(f"{_MODELS}.eagle3.config:Eagle3SpeculatorConfig", "offline.py"),
    Use(f"{_MODELS}.peagle.core:PEagleDraftModel.from_training_args", "draft_types.py",
        ("verifier_config", "t2d", "d2t")),
    Use(f"{_MODELS}.dflash.core:DFlashDraftModel.from_training_args", "draft_types.py",
        ("verifier_config", "t2d", "d2t")),
    Use("speculators.convert:convert_model", "outside.py",
        ("model", "verifier", "algorithm", "output_path", "norm_before_residual")),
    Use(f"{_SUFFIX}:SuffixDecodingCache", "proposers.py",
        ("max_tree_depth", "max_cached_requests")),
    Use(f"{_SUFFIX}:SuffixDecodingCache.speculate", "proposers.py",
        ("req_id", "context", "max_spec_tokens", "max_spec_factor", "min_token_prob")),
)  # fmt: skip


def drift(device: str, uses: Iterable[Use] = USES) -> list[str]:
    """What is not as it is used on a `cpu` or `cuda`, a sentence each; empty when all is."""
    used = [use for use in uses if device == "cpu" or not use.cpu_only]
    return [sentence for use in used for sentence in _drift_of(use)]


def _drift_of(use: Use) -> list[str]:
    where = f"{use.place} (specmill/{use.user})"
    module, _, path = use.place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        return [f"{where} is not there: {error}"]
    sentences = []
    if use.passed is not None:
        sentences += [f"{where} {fault}" for fault in _faults(found, use)]
    if absent := [name for name in use.named if name not in _names(found)]:
        sentences.append(f"{where} has no {', '.join(absent)} any more")
    return sentences


def _faults(called: Any, use: Use) -> list[str]:
    passed = set(use.passed or ())
    # a function that numba compiles has the Python one in it
    signature = inspect.signature(getattr(called, "py_func", called))
    parameters = {name: one for name, one in signature.parameters.items() if _counts(name, use)}
    plain = {name: one for name, one in parameters.items() if one.kind not in _CATCH_ALL}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    gone = passed - plain.keys()
    needed = {name for name, one in plain.items() if one.default is one.empty} - passed
    unheard = plain.keys() - passed if use.overridden else set()
    faults = []
    if gone and not takes_any:
        faults.append(f"takes no {', '.join(sorted(gone))} any more")
    if needed:
        faults.append(f"needs {', '.join(sorted(needed))} too")
    if unheard - needed:
        faults.append(f"takes {', '.join(sorted(unheard - needed))}, which ours does not")
    return [f"{fault}: {signature}"[:600] for fault in faults]


_CATCH_ALL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _counts(name: str, use: Use) -> bool:
    """Whether it is a parameter of the caller's: `self` is not, unless it is passed by name."""
    return name != "self" or "self" in (use.passed or ())


def _names(found: Any) -> set[str]:
    """Attributes of a class, and whatever attribute a method of it reads or sets."""
    named = set(dir(found)) | set(getattr(found, "__annotations__", ()))
    for kind in getattr(found, "__mro__", ()):
        for member in vars(kind).values():
            code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
            if isinstance(code, CodeType):
                named |= set(code.co_names)
    return named


def engine_knows(architecture: str) -> dict[str, Any]:
    """What vLLM says of an architecture: `serves`, `hands_states_out`; and its `quantisations`.

    `hands_states_out` is None when the class cannot be loaded here.
    """
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    serves = architecture in ModelRegistry.get_supported_archs()
    kind = ModelRegistry._try_load_model_cls(architecture) if serves else None
    return {
        "serves": serves,
        "hands_states_out": None if kind is None else bool(supports_eagle3(kind)),
        "quantisations": sorted(QUANTIZATION_METHODS),
    }


def _timed(action: Callable[[], Any]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def main() -> None:
    """Print what is installed as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m specmill.signatures",
        description="Compare what is used of vLLM and speculators with what is installed.",
    )
    parser.add_argument("architecture", nargs="?", help="a class of a config.json")
    chosen = parser.parse_args().architecture
    import_s = _timed(lambda: importlib.import_module("vllm.entrypoints.openai.api_server"))
    found = {"import_s": round(import_s, 1), "drift": drift(compat.device())}
    sys.stdout.write(json.dumps(found | (engine_knows(chosen) if chosen else {})) + "\n")


if __name__ == "__main__":
    main()

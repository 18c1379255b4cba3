"""Serve the verifier so that it hands hidden states out, to extraction or to online training.

It serves what params.yaml and models/verifier say, in the foreground; Ctrl-C ends it. States are
staged in a folder that whoever asks for them must see under the same path.

Run      python -m specmill.serve_states --port 8001
         dvc exp run -S 'runtime.extract_endpoints=[http://127.0.0.1:8001]' ...

SPECMILL_API_KEY in the environment of both is the key: a server that writes files for whoever asks
is not started without one, not even on loopback, where every user of the machine can ask.
"""

import argparse
import os
import sys
from pathlib import Path

from specmill import compat, paths
from specmill.engine_flags import parallel_flags, server_flags
from specmill.extract_engines import extraction_settings
from specmill.files import read_json
from specmill.layers import states_of
from specmill.params_file import load_params
from specmill.verifier import model_path


def main() -> None:
    """Become the server."""
    parser = argparse.ArgumentParser(
        prog="python -m specmill.serve_states",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument(
        "--staging", type=Path, default=paths.STAGING, help="shared folder (default: %(default)s)"
    )
    options = parser.parse_args()
    try:
        command, environment = _command(options.host, options.port, options.staging)
    except (ValueError, OSError) as error:
        sys.exit(f"serve_states: {error}")
    os.execve(command[0], command, environment)


def _command(host: str, port: int, staging: Path) -> tuple[list[str], dict[str, str]]:
    key = os.environ.get(compat.API_KEY)
    if not key:
        raise ValueError(
            f"{compat.API_KEY} is not set; choose a key, here and where states are asked for: "
            f"export {compat.API_KEY}=$(python -c 'import secrets; print(secrets.token_hex())')"
        )
    if not paths.IDENTITY.is_file():
        raise ValueError(f"{paths.IDENTITY} is missing; run `dvc repro verifier`")
    params, verifier = load_params(paths.PARAMS), read_json(paths.IDENTITY)
    runtime, machine = params.runtime, compat.device()
    spec = states_of(verifier, params.extract.aux_layer_ids, params.extract.dtype)
    model = model_path(paths.VERIFIER)
    staging.mkdir(parents=True, exist_ok=True)
    flags = [
        *compat.engine_arguments(machine, runtime.gpu_memory_utilization),
        *server_flags(extraction_settings(spec, staging, verifier)),
        *parallel_flags(model, verifier, params.parallel),
        "--disable-uvicorn-access-log",
        *("--host", host),
    ]
    environment = os.environ | compat.engine_environment(machine, runtime.cpu_kv_cache_gib)
    environment["VLLM_API_KEY"] = key
    return compat.server_command(model, port, flags), environment


if __name__ == "__main__":
    main()

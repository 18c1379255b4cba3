"""Does the pipeline run for a verifier's class with the installed versions? In minutes, on a twin.

Of the verifier only its config is read (and the names of its tensors, where they lie beside it). A
shrunken twin of its class (specmill.twin) goes through the pipeline's own code: hidden states of 8
samples, vocabulary, two training steps, export, and a server with n-gram drafts and one with a head
that is rigged to draft what the twin is rigged to say. Three engines are started.

Run      make preflight
         python -m specmill.preflight --params profiles/smoke.yaml
         python -m specmill.preflight --config FOLDER_OR_JSON

Ends with status 1 when a step fails, and says which known incompatibility that is.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from specmill import compat, paths
from specmill.configured import verifier_config, weight_dtypes
from specmill.engine_flags import server_flags
from specmill.engines import work_at
from specmill.extract import extract_missing
from specmill.extract_engines import extraction_settings
from specmill.files import machine_lock
from specmill.incompatibilities import RENDERING, TEXT_ALONE
from specmill.layers import states_of
from specmill.methods import speculative_configs
from specmill.params import Method, Params
from specmill.params_file import load_params
from specmill.preflight_checks import (
    answer_greedily,
    check_drafts,
    check_honoured,
    check_renders,
    check_states,
    look_at_connector,
    own_states,
)
from specmill.server import EngineRefused, Server, serve
from specmill.shrunk import shrunk_config
from specmill.steps import Steps, as_text
from specmill.store import HiddenStateStore
from specmill.text_decoder import head_tensors
from specmill.twin import (
    MAX_MODEL_LEN,
    TOKEN,
    K,
    draw_samples,
    is_wrapped,
    write_decoder,
    write_twin,
)
from specmill.verifier import identify, write_head_slice
from specmill.view import StateView

LOGS = Path("logs/preflight")
_MEMORY = 0.2
"""Share of a GPU's memory that each engine takes: two are up at once."""
_NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


class Preflight:
    """One twin and what is made of it, all in a scratch folder.

    Args:
        config: Content of the verifier's config.json.
        dtypes: Of its tensors by name; {} when they are not here.
        params: Of params.yaml.
        scratch: Receives everything.
        logs: Receives the engines' output.
    """

    def __init__(
        self, config: dict[str, Any], dtypes: dict[str, str], params: Params, scratch: Path,
        logs: Path,
    ):  # fmt: skip
        self.steps = Steps()
        self._config = config
        self._dtypes = dtypes
        self._params = params
        self._runtime = params.runtime.model_copy(update={"extract_endpoints": []})
        self._scratch = scratch
        self._logs = logs
        self._twin = scratch / "twin"
        self._slice = scratch / "slice"
        self._vocabulary = scratch / "vocab"
        self._identity: dict[str, Any] = {}
        self._samples = draw_samples()
        self._wrapper: Path | None = None
        self._towers: list[str] = []
        self._draft_id = -1

    def run(self) -> None:
        """Run every step; n-gram is served while hidden states are extracted."""
        self.steps.run("twin", [], self._make_twin)
        self.steps.run("tensor names", ["twin"], self._resolve_names)
        with ThreadPoolExecutor(2) as beside:
            ngram = beside.submit(self.steps.run, "ngram served", ["twin"], self._serve_ngram)
            self.steps.run("connector", [], look_at_connector)
            needs = ["twin", "connector"]
            extraction = beside.submit(self.steps.run, "extract", needs, self._extract)
            # ten seconds in which engines start anyway
            self.steps.run("speculators", [], _import_trainer)
            extraction.result()
            self.steps.run("aux layers", ["extract"], self._compare_states)
            self.steps.run("vocab", ["extract", "speculators"], self._choose_vocabulary)
            self.steps.run("train", ["vocab", "tensor names"], self._train)
            self.steps.run("export", ["train"], self._export)
            ngram.result()
        self.steps.run("head served", ["export"], self._serve_head)

    def _make_twin(self) -> str:
        config, left_out = shrunk_config(self._config, _dtype())
        write_twin(config, self._twin)
        about = {"name": "twin", "origin": "made of a config"}
        self._identity = identify(self._twin, about, MAX_MODEL_LEN, "auto")
        if is_wrapped(self._twin):
            left_out.append("its other towers: the decoder alone is served")
            if write_decoder(self._twin, self._scratch / "decoder"):
                self._wrapper, self._twin = self._twin, self._scratch / "decoder"
            else:
                self._towers = TEXT_ALONE
        return "; ".join([config["architectures"][0], *(f"without {x}" for x in left_out)])

    def _resolve_names(self) -> str:
        write_head_slice(self._twin, self._slice)
        if self._wrapper:
            write_head_slice(self._wrapper, self._scratch / "wrapped")
        if not self._dtypes:
            return "of the twin; the verifier's own tensors are not here"
        found = head_tensors(self._dtypes)
        return f"of the twin and the verifier: {', '.join(found.values())}"

    def _extract(self) -> str:
        staging = self._scratch / "staging"
        spec = states_of(self._identity, None, "auto")
        flags = [*server_flags(extraction_settings(spec, staging, self._identity)), *RENDERING]
        staging.mkdir()
        with (
            self._serve("extract", flags) as server,
            _key_sent(server.api_key),
            HiddenStateStore.alone(self._scratch / "store") as store,
        ):
            check_renders(server, self._runtime.request_timeout_s)
            extract_missing(
                self._samples,
                spec,
                store,
                lambda work: work_at([server.url], work, self._runtime.request_timeout_s),
                shard_bytes=2**24,
                staging=staging,
                window=self._runtime.extract_window,
            )
            keys = [sample.sample_key for sample in self._samples]
            store.write_view(self._scratch / "states", spec, keys, 2**24)
        return f"{len(keys)} samples, their ids echoed; conversations rendered"

    def _compare_states(self) -> str:
        view, sample = StateView(self._scratch / "states"), self._samples[0]
        _, states, _ = view.load(sample.sample_key)
        own = own_states(self._twin, sample.input_ids.tolist())
        return check_states(states, own, view.spec.layer_ids, self._identity["dtype"])

    def _choose_vocabulary(self) -> None:
        from specmill.twin_head import choose_vocabulary

        choose_vocabulary(self._samples, self._identity["vocab_size"], self._vocabulary)

    def _train(self) -> None:
        from specmill.twin_head import train_twin_head, two_steps

        self._checkpoint = train_twin_head(
            self._slice,
            self._identity,
            self._samples,
            StateView(self._scratch / "states"),
            self._vocabulary,
            two_steps(self._params.train),
            self._scratch,
        )

    def _export(self) -> str:
        from specmill.twin_head import check_exported, export_twin_head, rig

        head = self._scratch / "trained"
        export_twin_head(self._checkpoint, self._identity, self._vocabulary, head)
        self._draft_id = check_exported(head, self._vocabulary)
        rig(head, self._draft_id, self._scratch / "head")
        return f"lm_head, d2t and t2d are in it; draft id {self._draft_id} is token {TOKEN}"

    def _serve_ngram(self) -> str:
        entry = Method(method="ngram", section="spec", head="", settings=_NGRAM)
        found, _ = self._draft("ngram", entry)
        return f"acceptance length {found['acceptance_length']:.2f} of {found['num_drafts']} drafts"

    def _serve_head(self) -> str:
        head = str(self._scratch / "head")
        entry = Method(method="eagle3", section="spec", head=head, settings={})
        found, answers = self._draft("head", entry)
        check_honoured(found, answers, self._draft_id)
        return f"d2t honoured: all of {found['num_draft_tokens']} drafted tokens were accepted"

    def _draft(self, name: str, entry: Method) -> tuple[dict[str, Any], list[list[int]]]:
        """Serve the twin with a method; acceptance figures, and what it answered."""
        told = speculative_configs(name, entry, [K], self._identity)[K]
        flags = [*compat.verifier_arguments(self._identity), "--enforce-eager"]
        with self._serve(name, [*flags, "--speculative-config", json.dumps(told)]) as server:
            prompts = [[*sample.prompt_token_ids, *2 * [TOKEN]] for sample in self._samples]
            counts, answers = asyncio.run(
                answer_greedily(server, prompts, self._runtime.request_timeout_s)
            )
            return check_drafts(counts, K), answers

    @contextmanager
    def _serve(self, name: str, flags: list[str]) -> Iterator[Server]:
        log = self._logs / f"{name}.log"
        try:
            with serve(
                self._twin,
                [*flags, *self._towers],
                log,
                cpu_kv_cache_gib=1,
                gpu_memory_utilization=_MEMORY,
                startup_timeout_s=self._runtime.startup_timeout_s,
                label=name,
            ) as server:
                yield server
        except EngineRefused:
            raise
        except (RuntimeError, ValueError) as error:
            # what a server answers is not why
            reason = compat.engine_error(log.read_text(errors="replace")) if log.is_file() else ""
            raise RuntimeError(f"{error} (its log, {log}: {reason})") from error


def _import_trainer() -> str:
    import specmill.twin_head  # noqa: F401 - all of speculators that training uses

    return f"{compat.package_version('speculators')} has what training imports"


@contextmanager
def _key_sent(key: str) -> Iterator[None]:
    """Have extraction send a server's key."""
    before = os.environ.get(compat.API_KEY)
    os.environ[compat.API_KEY] = key
    try:
        yield
    finally:
        del os.environ[compat.API_KEY]
        if before is not None:
            os.environ[compat.API_KEY] = before


def _dtype() -> str:
    return "float32" if compat.device() == "cpu" else "bfloat16"


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(
        prog="python -m specmill.preflight",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--params", type=Path, default=paths.PARAMS, help="default: %(default)s")
    parser.add_argument("--config", type=Path, help="instead of the verifier of --params")
    options = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for chatty in ("httpx", "speculators", "transformers"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    try:
        params = load_params(options.params)
        config = verifier_config(options.config, params.verifier)
        dtypes = weight_dtypes(options.config, params.verifier)
    except (ValueError, OSError) as error:
        sys.exit(f"preflight: {error}")
    with (
        tempfile.TemporaryDirectory() as scratch,
        machine_lock(alone=False),
        redirect_stdout(sys.stderr),  # speculators shows its progress there
    ):
        preflight = Preflight(config, dtypes, params, Path(scratch), LOGS)
        preflight.run()
    sys.stdout.write(as_text(preflight.steps.done.values()))
    sys.exit(0 if preflight.steps.ended_well else 1)


if __name__ == "__main__":
    main()

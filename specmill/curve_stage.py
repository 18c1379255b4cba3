"""What the stage `curves` measures, and with what: params.yaml and what earlier stages wrote."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmill import compat, paths
from specmill.curve_drafts import CurveDrafts
from specmill.curve_engines import Engine, plan_engines, plan_groups, steering_flags
from specmill.curve_kinds import Kind, curve_kinds
from specmill.files import digest, read_json
from specmill.fleet import Starter, server_starter
from specmill.layers import aux_layer_ids
from specmill.params import Params
from specmill.params_parallel import Parallel
from specmill.samples import Sample, digest_of
from specmill.verifier import model_path


@dataclass(frozen=True)
class Planned:
    """Engines, and where finished groups of them are kept."""

    groups: list[list[Engine]]
    """Of `plan_groups`."""
    refused: dict[str, str]
    """Why a kind has no engine, by kind."""
    start: Starter
    kept: Path
    """Named by everything that shapes a group's measurement."""


def one_copy(params: Params) -> Parallel:
    """`parallel` for one copy of the engine, which a step is of."""
    return params.parallel.model_copy(update={"data_parallel_size": 1})


def plan(params: Params, verifier: dict[str, Any], samples: list[Sample], scratch: Path) -> Planned:
    """The engines of every kind of draft in params.yaml.

    Args:
        params: All of it.
        verifier: Its identity.json.
        samples: The bench prompts.
        scratch: An empty folder, which receives what is drafted with; stays while servers run.

    Raises:
        ValueError: when a geometry or settings do not fit the verifier.
    """
    rows, _ = curve_kinds(params)
    kinds = {kind.name: kind for kind in rows.values()}
    model, parallel = model_path(paths.VERIFIER), one_copy(params)
    aux_ids = aux_layer_ids(params.extract.aux_layer_ids, verifier["num_layers"])
    vocab_size, ks = params.vocab.draft_vocab_size, params.curves.tokens
    drafts = CurveDrafts(model, paths.VERIFIER_HEAD, verifier, aux_ids, vocab_size, max(ks))
    engines, refused = plan_engines(kinds.values(), drafts, ks, verifier, compat.device(), scratch)
    start = server_starter(
        "curves",
        model,
        verifier,
        params.bench,
        parallel,
        params.runtime,
        paths.ROOT / "logs",
        steering_flags(engines),
    )
    kept = _kept(params, verifier, samples, [aux_ids, vocab_size, _geometries(kinds)])
    return Planned(plan_groups(engines, params.bench.reference), refused, start, kept)


def _geometries(kinds: dict[str, Kind]) -> list[Any]:
    return [kind.geometry for kind in kinds.values()]


def _kept(
    params: Params, verifier: dict[str, Any], samples: list[Sample], drafts: list[Any]
) -> Path:
    bench, runtime = params.bench, params.runtime
    inputs = {
        "verifier": verifier,
        "hardware": read_json(paths.HARDWARE),
        "prompts": digest_of(samples),
        "curves": params.curves.model_dump(),
        "drafts": drafts,
        "engine": [bench.reference, bench.enforce_eager, one_copy(params).model_dump()],
        "memory": [runtime.cpu_kv_cache_gib, runtime.gpu_memory_utilization],
    }
    return paths.CACHE / "curves" / digest(inputs)

"""Send waves of requests to the engines of step-time curves, each kind beside `none`.

    beside:   none and one kind up; in each repeat, batch by batch: none, K, K, K; then backwards
    bracket:  one engine up at a time, none first; waves of the same repeat are compared

An engine is started once. Before what counts, it gets one short wave at every batch and K, which
warms it up and tells how many tokens a step brings, hence how long answers must be for
`curves.steps` of them.
"""

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from specmill.client import Client, TimedAnswer, run_closed_loop
from specmill.curve_engines import Engine
from specmill.curves import tokens_per_chunk, wave_record
from specmill.files import read_kept, write_json
from specmill.fleet import Fleet, Refused, Starter
from specmill.params_bench import Bench
from specmill.params_curves import Curves
from specmill.samples import Sample
from specmill.server import Server

_LEAD = 4
"""Steps beyond those timed: requests of one wave begin a few steps apart."""


def wave_order(
    group: list[Engine], batches: list[int], repeat: int
) -> Iterator[tuple[Engine, int, int]]:
    """Engine, K and batch of each wave of a repeat; every second repeat runs backwards."""
    waves = [(engine, k, batch) for batch in batches for engine in group for k in engine.ks]
    return iter(waves[::-1] if repeat % 2 else waves)


def deal_prompts(
    samples: list[Sample], chosen: Curves, max_model_len: int
) -> dict[tuple[int, int], list[list[int]]]:
    """Token ids of each wave's prompts, by repeat (-1 is the warm-up) and batch.

    Engines that are compared get the same ones, so that their contexts are equally long; every
    repeat and batch has others while there are enough, prompt types mixed.

    Raises:
        ValueError: when there is no prompt, or answers do not fit behind one.
    """
    ordered = sorted(samples, key=lambda sample: sample.sample_key)
    prompts = [sample.prompt_token_ids for sample in ordered]
    if not prompts:
        raise ValueError("there are no bench prompts (prepare.bench)")
    most, longest = max(chosen.tokens), max(map(len, prompts))
    if longest + chosen.steps + _LEAD + most + 1 > max_model_len:
        raise ValueError(
            f"the longest bench prompt has {longest} tokens and curves.steps is {chosen.steps}, "
            f"more than verifier.max_model_len ({max_model_len}) holds with {most} draft tokens"
        )
    deck = cycle(prompts)
    places = [(repeat, batch) for repeat in range(-1, chosen.repeats) for batch in chosen.batch]
    return {(repeat, batch): list(islice(deck, batch)) for repeat, batch in places}


def mean_length(prompts: dict[tuple[int, int], list[list[int]]]) -> float:
    """Mean tokens of the prompts that are measured with."""
    waves = [wave for (repeat, _), wave in prompts.items() if repeat >= 0]
    return round(fmean(len(ids) for wave in waves for ids in wave), 1)


def curve_fleet(
    start: Starter,
    prompts: dict[tuple[int, int], list[list[int]]],
    bench: Bench,
    timeout_s: float,
) -> Fleet:
    """A fleet whose servers are warmed up with single short requests; waves do the rest."""
    short = {"concurrency": [1], "rates": [], "max_tokens": _LEAD}
    warmup = [ids for (repeat, _), wave in prompts.items() if repeat < 0 for ids in wave]
    return Fleet(start, warmup, bench.model_copy(update=short), timeout_s, {})


@dataclass
class Measured:
    """All waves, and how the engines ran."""

    waves: list[dict[str, Any]] = field(default_factory=list)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`compat.engine_facts`, by the engine's name."""
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    """Why an engine did not start, by kind and the K it was started for."""

    @property
    def missing(self) -> dict[str, str]:
        """Why a kind has no wave at any K, by kind."""
        found = {wave["kind"] for wave in self.waves}
        return {
            kind: next(iter(reasons.values()))
            for kind, reasons in self.refused.items()
            if kind not in found
        }


def measure_curves(
    groups: list[list[Engine]],
    fleet: Fleet,
    prompts: dict[tuple[int, int], list[list[int]]],
    chosen: Curves,
    max_model_len: int,
    kept: Path,
) -> Measured:
    """Measure group after group; what an interrupted stage has kept of one is not measured again.

    Args:
        groups: Of `plan_groups`.
        fleet: Starts and pauses the servers.
        prompts: Of `deal_prompts`.
        chosen: Batches, steps and repeats.
        max_model_len: Longest context of the engines, in tokens.
        kept: Receives every finished group; named by everything that shapes it.

    Raises:
        RuntimeError: when no step of a wave had all its requests in flight.
    """
    measured = Measured()
    for group in groups:
        file = kept / f"{group[-1].run.label}.json"
        found = read_kept(file)
        if found is None:
            try:
                waves = _measure_group(group, fleet, prompts, chosen, max_model_len)
            except Refused as reason:
                kind = group[-1].kind
                measured.refused.setdefault(kind, {})[str(reason.k)] = str(reason)
                continue
            ran = {engine.name: _facts(fleet, engine) for engine in group}
            found = {"waves": waves, "engines": ran}
            write_json(file, found)
        measured.waves += found["waves"]
        measured.engines |= found["engines"]
        for engine in group:  # the fleet tells a refused method from a broken engine by them
            fleet.facts.setdefault(f"{engine.run.label}_0", found["engines"][engine.name])
    return measured


def _measure_group(
    group: list[Engine],
    fleet: Fleet,
    prompts: dict[tuple[int, int], list[list[int]]],
    chosen: Curves,
    max_model_len: int,
) -> list[dict[str, Any]]:
    fleet.keep([engine.run for engine in group])
    beside = group[-1].name if len(group) > 1 else ""
    tokens: dict[tuple[str, int, int], float] = {}
    waves = []
    for repeat in tqdm(range(-1, chosen.repeats), desc=f"waves of {group[-1].name}"):
        for engine, k, batch in wave_order(group, chosen.batch, repeat):
            ids = prompts[repeat, batch]
            place = (engine.name, k, batch)
            wanted = k + 1 + _LEAD if repeat < 0 else (chosen.steps + _LEAD) * tokens[place]
            room = max_model_len - max(map(len, ids)) - k
            sampling = {
                "temperature": 0.0,
                "max_tokens": min(ceil(wanted), room),
                "ignore_eos": True,
                **({"vllm_xargs": {"k": k}} if engine.is_steered else {}),
            }
            _, server = fleet.server(engine.run)
            answers = asyncio.run(send_wave(server, fleet.timeout_s, ids, sampling))
            if repeat < 0:
                tokens[place] = tokens_per_chunk(answers, k)
            else:
                waves.append(wave_record(engine.kind, k, repeat, beside, answers))
    return waves


async def send_wave(
    server: Server, timeout_s: float, prompts: list[list[int]], sampling: dict[str, Any]
) -> list[TimedAnswer]:
    """Send prompts at once; each has a salt under which the prefix cache holds nothing."""
    async with Client(server, timeout_s) as client:
        return await run_closed_loop(
            prompts,
            lambda ids: client.complete_timed(ids, sampling | {"cache_salt": secrets.token_hex(8)}),
            len(prompts),
        )


def _facts(fleet: Fleet, engine: Engine) -> dict[str, Any]:
    """How the last server of an engine ran."""
    label = engine.run.label
    return [facts for name, facts in fleet.facts.items() if name.rpartition("_")[0] == label][-1]


def describe(groups: list[list[Engine]], chosen: Curves) -> str:
    """What is about to be measured: engine starts are what costs on a large model."""
    starts = len({engine.run.label for group in groups for engine in group})
    waves = sum(len(engine.ks) for group in groups for engine in group) * len(chosen.batch)
    return (
        f"plan: {starts} engine starts, {waves} waves each {chosen.repeats} times, "
        f"{chosen.steps} steps of each timed"
    )

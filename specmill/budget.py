"""What every stage will take, in minutes, bytes and money, from params.yaml and the rates here.

    prepare    one engine start; all turns answered, runtime.request_concurrency at once
    extract    one engine start; every sample read once, its states written
    train      6 FLOP per weight and token, forward and backward, for each step of the
               training-time test and each epoch (arXiv 2001.08361, section 2.1)
    curves     engine starts of each kind; `steps` timed of every wave
    bench@M    engine starts; every cell on both servers
    sampling@M engine starts with a model too small to count

Left out, since they start no engine and train nothing: seconds to a few minutes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from specmill.curve_engines import engines_of
from specmill.curve_kinds import NONE, TOKENS, curve_kinds
from specmill.geometry import eagle3_weights
from specmill.params import Method, Params
from specmill.rates import Rates
from specmill.workload import Workload, bench_cells, bench_starts

_OPTIMIZER_COPIES = 3
"""A checkpoint has the weights and two moments, in float32."""


@dataclass(frozen=True)
class Cost:
    """What one stage will take."""

    stage: str
    starts: int
    """Of engines."""
    work_s: float
    """Besides."""
    seconds: float
    written_bytes: int
    basis: str
    """`measured here`, `estimated`, or which part is which."""


class Budget:
    """The costs of a run."""

    def __init__(self, params: Params, work: Workload, rates: Rates, config: dict[str, object]):
        """
        Args:
            params: Of params.yaml.
            work: How much there is to do.
            rates: How fast it is done.
            config: The config.json of the verifier, or of the draft model where that has a shape
                of its own.
        """
        self._params, self._work, self._rates, self._config = params, work, rates, config

    @property
    def state_bytes(self) -> int:
        """Hidden states of all samples."""
        if self._params.extract.mode == "online":
            return 0
        return self._work.all.row_tokens * self._rates.size.state_bytes_per_token

    @property
    def checkpoint_bytes(self) -> int:
        """Of all epochs of the trained heads."""
        trained = [self._params.train.epochs]
        trained += [sibling.epochs for sibling in self._params.siblings.values()]
        return sum(trained) * self._head_weights() * 4 * _OPTIMIZER_COPIES

    def costs(self) -> list[Cost]:
        """Every stage that takes long, in the order of the pipeline."""
        params = self._params
        found = [self._prepare(), self._extract()]
        if params.extract.mode == "store":
            found.append(self._train("train", params.train.epochs, params.train.max_samples))
            found += [
                self._train(f"train_sibling@{name}", one.epochs, one.max_samples)
                for name, one in params.siblings.items()
            ]
        found.append(self._curves())
        for name, method in params.methods.items():
            found += [self._bench(name, method), self._sampling(name)]
        if self._rates.size.geometry.experts:
            bench = self._work.bench
            read_s = self._rates.prefill_s(bench.row_tokens, bench.row_tokens // bench.number)
            found.append(self._cost("routing", 1, read_s))
        return found

    def _cost(self, stage: str, starts: int, work_s: float, size: int = 0, steps: str = "") -> Cost:
        rates = self._rates
        basis = "measured here" if rates.starts_measured else "estimated"
        steps = steps or basis
        if steps != basis:
            basis = f"starts {basis}, work {steps}"
        return Cost(stage, starts, work_s, starts * rates.start_s() + work_s, size, basis)

    @property
    def _steps(self) -> str:
        return "measured here" if self._rates.steps_measured else "estimated"

    def _prepare(self) -> Cost:
        chosen, work = self._params.prepare, self._work
        asked = work.heldout + work.bench
        if chosen.responses == "verifier":
            asked += work.training
        context = asked.row_tokens // asked.number
        at_once = min(self._params.runtime.request_concurrency, asked.number)
        decode_s = asked.answer_tokens / at_once * self._rates.step_s(at_once, context)
        read_s = self._rates.prefill_s(asked.read_tokens, context)
        return self._cost("prepare", 1, decode_s + read_s, steps=self._steps)

    def _extract(self) -> Cost:
        if self._params.extract.mode == "online":
            return self._cost("extract", 0, 0.0)
        every = self._work.all
        read_s = self._rates.prefill_s(every.row_tokens, every.row_tokens // every.number)
        write_s = self.state_bytes / self._rates.speed.write_bytes_per_s
        starts = 0 if self._params.runtime.extract_endpoints else 1
        return self._cost("extract", starts, max(read_s, write_s), self.state_bytes, "estimated")

    def _train(self, stage: str, epochs: int, max_samples: int | None) -> Cost:
        chosen, training = self._params.train, self._work.training
        share = min(1.0, (max_samples or training.number) / training.number)
        tokens = training.row_tokens * share * epochs
        flop = 6 * self._head_weights() * tokens * chosen.ttt_steps
        work_s = flop / (self._params.runtime.train_processes * self._rates.speed.flop_per_s)
        size = epochs * self._head_weights() * 4 * _OPTIMIZER_COPIES
        return self._cost(stage, 0, work_s, size, "estimated")

    def _head_weights(self) -> int:
        return eagle3_weights(self._config, self._params.vocab.draft_vocab_size)

    def _curves(self) -> Cost:
        curves, rates = self._params.curves, self._rates
        kinds = {kind.name: kind for kind in curve_kinds(self._params)[0].values()}
        starts, work_s = 1, 0.0
        for kind in kinds.values():
            ks = [0] if kind.name == NONE else curves.tokens
            if kind.name != NONE:
                starts += len(engines_of(kind, dict.fromkeys(ks), rates.device))
            for batch in curves.batch:
                step_s = max(rates.step_s(batch, self._work.bench_prompt_tokens, k) for k in ks)
                waves = len(ks) + (kind.name == TOKENS)  # K = 0 too
                work_s += waves * (curves.repeats + 1) * curves.steps * step_s
        return self._cost("curves", starts, work_s, steps=self._steps)

    def _bench(self, name: str, method: Method) -> Cost:
        params = self._params
        speculates = method.method != "none"
        lengths = self._lengths(speculates)
        # beside, the reference answers next to every K
        references = len(lengths) if params.bench.reference == "beside" else 1
        work_s = sum(self._arm_s(k) for k in lengths) + references * self._arm_s(0)
        starts = bench_starts(params, speculates)
        return self._cost(f"bench@{name}", starts, work_s, steps=self._steps)

    def _sampling(self, name: str) -> Cost:
        start_s = self._rates.bare_start_s()
        return Cost(f"sampling@{name}", 1, 0.0, start_s, 0, "estimated")

    def _lengths(self, speculates: bool) -> list[int]:
        spec = self._params.spec
        return sorted({spec.tokens, *spec.sweep}) if speculates else [0]

    def _arm_s(self, k: int) -> float:
        """Seconds that one server answers for, with no draft accepted."""
        return sum(self._cell_seconds(k))

    def _cell_seconds(self, k: int) -> Iterator[float]:
        bench, rates = self._params.bench, self._rates
        context = self._work.bench_prompt_tokens + max(bench.context)
        for cell in bench_cells(self._params, self._work.num_categories):
            if not cell.in_flight:
                yield cell.seconds
                continue
            tokens = cell.waves * cell.in_flight * context
            step_s = rates.step_s(cell.in_flight, context, k)
            yield rates.prefill_s(tokens, context) + cell.waves * bench.max_tokens * step_s

"""What every stage will take, in minutes, bytes and money, from params.yaml and the rates here.

    prepare    one engine start; all turns answered, runtime.request_concurrency at once
    extract    one engine start; every sample read once, its states written
    train      6 FLOP per weight and token, forward and backward, for each step of the
               training-time test and each epoch (arXiv 2001.08361, section 2.1)
    curves     engine starts of each kind; `steps` timed of every wave
    bench@M    engine starts; every cell on both servers
    bench_scheduled@M  the same with one server, of the largest K of the curves at every load
    sampling@M engine starts with a model too small to count

specmill/budget_heads.py has further heads and replays. What no rate was ever measured for has a row
without a time. Left out, since they start no engine and train nothing: seconds to a few minutes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from specmill.budget_heads import (
    COPIES,
    LOOKED_UP,
    NOT_REPLAYED,
    cut_bytes,
    medusa_draft_flop,
    medusa_flop,
    medusa_weights,
    share,
)
from specmill.curve_engines import engines_of
from specmill.curve_kinds import NONE, TOKENS, curve_kinds
from specmill.geometry import eagle3_weights
from specmill.params import Method, Params
from specmill.params_heads import DraftModel, ForeignHead, Medusa
from specmill.rates import Rates
from specmill.workload import Workload, bench_cells, bench_starts

NOT_ESTIMATED = "not estimated: no measured rate"


@dataclass(frozen=True)
class Cost:
    """What one stage will take."""

    stage: str
    starts: int
    """Of engines."""
    work_s: float
    """Besides."""
    seconds: float | None
    """None where no rate was ever measured."""
    written_bytes: int
    basis: str
    """`measured here`, `estimated`, which part is which, or NOT_ESTIMATED."""


class Budget:
    """The costs of a run."""

    def __init__(
        self,
        params: Params,
        work: Workload,
        rates: Rates,
        config: dict[str, object],
        num_gpus: int = 0,
    ):
        """
        Args:
            params: Of params.yaml.
            work: How much there is to do.
            rates: How fast it is done.
            config: The config.json of the verifier, or of the draft model where that has a shape
                of its own.
            num_gpus: Of this machine.
        """
        self._num_gpus = num_gpus
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
        params = self._params
        epochs = params.train.epochs
        epochs += sum(sibling.epochs for sibling in params.siblings.values())
        epochs += sum(foreign.epochs for foreign in params.foreign_heads.values())
        medusa = sum(self._medusa_bytes(one) for one in params.medusa.values())
        return epochs * self._head_bytes + medusa

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
            found += [self._medusa(name, one) for name, one in params.medusa.items()]
        found += [self._draft_model(name, one) for name, one in params.draft_models.items()]
        found += self._heads()
        found += self._replays()
        found.append(self._curves())
        for name, method in params.methods.items():
            lengths = self._lengths(method.method != "none")
            found += [self._bench(f"bench@{name}", lengths), self._sampling(name)]
        found += [
            self._bench(f"bench_scheduled@{name}", [max(params.curves.tokens)])
            for name in params.scheduled
        ]
        if self._rates.size.geometry.experts:
            bench = self._work.bench
            read_s = self._rates.prefill_s(bench.row_tokens, bench.row_tokens // bench.number)
            found.append(self._cost("routing", 1, read_s))
        return found

    def _cost(self, stage: str, starts: int, work_s: float, size: int = 0, steps: str = "") -> Cost:
        rates = self._rates
        basis = "measured here" if rates.starts_measured else "estimated"
        steps = steps or basis
        if not starts:
            basis = steps
        elif steps != basis:
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
        runtime = self._params.runtime
        apart = self._apart(runtime.prepare_engines)
        at_once = min(runtime.request_concurrency * runtime.prepare_engines, asked.number)
        each = max(1, at_once // apart)
        decode_s = asked.answer_tokens / at_once * self._rates.step_s(each, context)
        read_s = self._rates.prefill_s(asked.read_tokens, context) / apart
        return self._cost("prepare", 1, decode_s + read_s, steps=self._steps)

    def _apart(self, engines: int) -> int:
        """Engines that share no GPU; those that do share its memory and arithmetic, as on a CPU."""
        return max(1, min(engines, self._num_gpus // self._rates.gpus_per_engine))

    def _extract(self) -> Cost:
        if self._params.extract.mode == "online":
            return self._cost("extract", 0, 0.0)
        every = self._work.all
        read_s = self._rates.prefill_s(every.row_tokens, every.row_tokens // every.number)
        read_s /= self._apart(self._params.runtime.extract_engines)
        write_s = self.state_bytes / self._rates.speed.write_bytes_per_s
        starts = 0 if self._params.runtime.extract_endpoints else 1
        return self._cost("extract", starts, max(read_s, write_s), self.state_bytes, "estimated")

    def _train(self, stage: str, epochs: int, max_samples: int | None) -> Cost:
        chosen, training = self._params.train, self._work.training
        tokens = training.row_tokens * share(training, max_samples) * epochs
        flop = 6 * self._head_weights() * tokens * chosen.ttt_steps
        work_s = flop / (self._params.runtime.train_processes * self._rates.speed.flop_per_s)
        return self._cost(stage, 0, work_s, epochs * self._head_bytes, "estimated")

    def _medusa(self, name: str, chosen: Medusa) -> Cost:
        training = self._work.training
        positions = training.answer_tokens * share(training, chosen.max_samples) * chosen.epochs
        flop = medusa_flop(chosen, self._rates.size, self._draft_vocab_size, positions)
        work_s, size = flop / self._rates.speed.flop_per_s, self._medusa_bytes(chosen)
        return self._cost(f"train_medusa@{name}", 0, work_s, size, "estimated")

    def _medusa_bytes(self, chosen: Medusa) -> int:
        """Of the checkpoints of all its epochs."""
        blocks, _ = medusa_weights(chosen, self._rates.size, self._draft_vocab_size)
        return chosen.epochs * blocks * 4 * COPIES

    def _draft_model(self, name: str, chosen: DraftModel) -> Cost:
        size = cut_bytes(self._rates.size, chosen.num_layers)
        return self._cost(f"draft_model@{name}", 0, self._copied_s(size), size, "estimated")

    def _copied_s(self, size: int) -> float:
        """Of reading so many bytes from the disk and writing them to it."""
        speed = self._rates.speed
        return size / speed.read_bytes_per_s + size / speed.write_bytes_per_s

    def _heads(self) -> Iterator[Cost]:
        params = self._params
        for name in params.heads:
            yield Cost(f"head@{name}", 0, 0.0, None, 0, NOT_ESTIMATED)
        if params.extract.mode == "store":
            for name, foreign in params.foreign_heads.items():
                yield self._foreign(f"foreign_head@{name}", foreign)
        for name in params.spoiled_heads:
            yield Cost(f"spoiled_head@{name}", 0, 0.0, None, 0, NOT_ESTIMATED)

    def _foreign(self, stage: str, chosen: ForeignHead) -> Cost:
        work, rates = self._work, self._rates
        tokens = int(work.training.row_tokens * share(work.training, chosen.max_samples))
        tokens += work.heldout.row_tokens
        states = tokens * rates.size.state_bytes_per_token
        context = work.all.row_tokens // work.all.number
        extract_s = max(rates.prefill_s(tokens, context), states / rates.speed.write_bytes_per_s)
        trained = self._train(stage, chosen.epochs, chosen.max_samples)
        copied = rates.size.weight_bytes
        return self._cost(
            stage, 1, self._copied_s(copied) + extract_s + trained.work_s,
            copied + states + trained.written_bytes, "estimated",
        )  # fmt: skip

    def _replays(self) -> Iterator[Cost]:
        for name, method in self._params.methods.items():
            if method.method in LOOKED_UP:
                yield Cost(f"replay@{name}", 0, 0.0, None, 0, NOT_ESTIMATED)
            elif method.method not in NOT_REPLAYED and self._params.extract.mode == "store":
                yield self._replay(f"replay@{name}", method)

    def _replay(self, stage: str, method: Method) -> Cost:
        """Of a head, on the answers to the bench's prompts."""
        medusa = {f"models/medusa/{name}": one for name, one in self._params.medusa.items()}
        bench = self._work.bench
        if method.head in medusa:
            each = medusa_draft_flop(medusa[method.head], self._rates.size, self._draft_vocab_size)
            flop = each * bench.row_tokens
        else:  # as if it were the trained head, whose shape and number of drafts are known
            flop = 2 * self._head_weights() * bench.row_tokens * self._params.train.ttt_steps
        return self._cost(stage, 0, flop / self._rates.speed.flop_per_s, steps="estimated")

    @property
    def _draft_vocab_size(self) -> int:
        return self._params.vocab.draft_vocab_size

    @property
    def _head_bytes(self) -> int:
        """Of one checkpoint of the trained head."""
        return self._head_weights() * 4 * COPIES

    def _head_weights(self) -> int:
        return eagle3_weights(self._config, self._draft_vocab_size)

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

    def _bench(self, stage: str, lengths: list[int]) -> Cost:
        """Of one row with these K."""
        # beside, the reference answers next to every K
        references = len(lengths) if self._params.bench.reference == "beside" else 1
        work_s = sum(self._arm_s(k) for k in lengths) + references * self._arm_s(0)
        starts = bench_starts(self._params, len(lengths))
        return self._cost(stage, starts, work_s, steps=self._steps)

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

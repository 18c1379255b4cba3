"""Between engines and the store: which samples are open, and filing what engines have staged.

    engine    writes <staging>/<request>.safetensors, and holds its .lock meanwhile
    filer     waits for the lock, checks that this is the sample that was asked for, and queues it
              for a shard; the file is deleted when its shard is safe

So a sample that an engine has finished is never lost: what a killed run leaves in the staging
folder is adopted by the next one. At most `window` tokens an engine are under way, whatever is
slow.
"""

import fcntl
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tqdm import tqdm

from specmill.samples import Sample
from specmill.shards import SUFFIX, Piece, Shard, StateSpec, read_shard
from specmill.states import wait_for
from specmill.store import HiddenStateStore
from specmill.writer import ShardWriter

logger = logging.getLogger(__name__)


def adopt(staging: Path, store: HiddenStateStore, shard_bytes: int, *, wait: bool = True) -> int:
    """File what is staged and not in the store yet, each sample under its own spec.

    Deletes what the store has already, files that were cut, and what failed writes left.

    Args:
        staging: The folder, which is made if need be.
        store: Receives the samples.
        shard_bytes: Size at which a shard is closed.
        wait: Whether to wait for engines that are still writing, or to leave them alone.

    Returns:
        Number of samples that the store has gained.
    """
    staging.mkdir(parents=True, exist_ok=True)
    for path in being_written(staging) if wait else ():
        logger.info("waiting for the engine that is still writing %s", path)
        wait_for(path)
    found: dict[StateSpec, dict[str, Piece]] = {}
    for path in sorted(staging.glob("*" + SUFFIX)):
        if shard := read_staged(path):
            (piece,) = shard.pieces(path)
            here, key = found.setdefault(shard.spec, {}), piece.row.sample_key
            if key in here or store.holds(shard.spec, key):
                path.unlink()
            else:
                here[key] = piece
    _sweep(staging)
    for spec, here in found.items():
        with store.writer(spec, shard_bytes) as writer:
            for piece in here.values():
                writer.add(piece, staged=True)
    return sum(map(len, found.values()))


def _sweep(staging: Path) -> None:
    """Delete locks that nobody holds, and what failed writes left."""
    leftovers = {lock: lock.with_suffix("") for lock in staging.glob("*.lock")}
    for kind in ("*.tmp", "*.error"):
        leftovers |= {file: file.with_suffix(SUFFIX) for file in staging.glob(kind)}
    for leftover, path in leftovers.items():
        if not is_locked(path):
            leftover.unlink(missing_ok=True)


def is_locked(path: Path) -> bool:
    """Whether an engine holds the lock of what it stages at `path`."""
    try:
        handle = os.open(path.with_name(path.name + ".lock"), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def being_written(staging: Path) -> list[Path]:
    """What engines are staging: their locks are held."""
    paths = [lock.with_suffix("") for lock in sorted(staging.glob("*.lock"))]
    return [path for path in paths if is_locked(path)]


def read_staged(path: Path) -> Shard | None:
    """What an engine staged; a file that is not whole is deleted."""
    if not path.is_file():
        return None
    try:
        shard = read_shard(path, named=False)
    except ValueError as error:
        logger.warning("%s; deleting it", error)
        path.unlink()
        return None
    if len(shard.rows) != 1:
        logger.warning("%s is not what an engine stages; it is left alone", path)
        return None
    return shard


class Work:
    """The samples of one extraction: handed out to engines, filed when they are staged.

    For any number of engines and threads. What goes wrong while filing is raised by `take` and
    `is_done`.
    """

    def __init__(
        self,
        samples: list[Sample],
        spec: StateSpec,
        writer: ShardWriter,
        staging: Path,
        window: int,
    ):
        self.num_tokens = sum(len(sample.input_ids) for sample in samples)
        self.staging = staging.resolve()
        self._queue = deque(samples)
        self._open = {sample.sample_key: sample for sample in samples}
        self._spec = spec
        self._writer = writer
        self._window = window
        self._under_way: Counter[str] = Counter()
        # a Condition would stay locked when a signal raises while it is being entered
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._filer = ThreadPoolExecutor(1)
        self._unwritten: set[str] = set()
        self._bar = tqdm(
            total=self.num_tokens, unit="tok", unit_scale=True, desc="hidden states", smoothing=0.05
        )

    def take(self, engine: str) -> Sample | None:
        """A sample for an engine; None when it has its fill, or nothing is left to hand out."""
        with self._lock:
            if self._failure:
                raise self._failure
            if not self._queue or self._under_way[engine] >= self._window:
                return None
            sample = self._queue.popleft()
            if not self._under_way:  # the engines' start is no part of the pace
                self._bar.unpause()
            self._under_way[engine] += len(sample.input_ids)
            return sample

    def give_back(self, engine: str, samples: Iterable[Sample]) -> None:
        """What an engine will not finish; others take it first."""
        for sample in samples:
            self._hand_out_again(sample)
            with self._lock:
                self._under_way[engine] -= len(sample.input_ids)

    def staged(self, engine: str, sample: Sample, path: str) -> None:
        """File, in the background, what an engine says it stages at `path`."""
        filing = self._filer.submit(self._file, sample, Path(path).resolve())
        filing.add_done_callback(partial(self._filed, engine, sample))

    def is_written(self, path: str) -> bool:
        """Whether an engine has let go of `path`; elsewhere nothing is looked at (see `staged`)."""
        resolved = Path(path).resolve()
        return resolved.parent != self.staging or not is_locked(resolved)

    def pick_up(self) -> Future[None]:
        """File, in the background, what a dead engine has staged without a word."""
        return self._filer.submit(self._pick_up)

    @property
    def is_done(self) -> bool:
        """Whether every sample is filed."""
        with self._lock:
            if self._failure:
                raise self._failure
            return not self._open

    def wait(self) -> None:
        """Wait for a moment in which something may be filed."""
        time.sleep(0.01)

    def close(self) -> None:
        """Hand nothing out any more, and wait until everything that is staged is filed."""
        self._filer.shutdown()
        with self._lock:
            self._queue.clear()
            self._open.clear()
        self._bar.close()

    def _file(self, sample: Sample, path: Path) -> None:
        if sample.sample_key not in self._open:  # another engine was faster
            return
        if shard := self._checked(sample, path):
            self._keep(shard, path)
        else:
            self._hand_out_again(sample)

    def _filed(self, engine: str, sample: Sample, filing: Future[None]) -> None:
        with self._lock:
            self._failure = self._failure or filing.exception()
            self._under_way[engine] -= len(sample.input_ids)

    def _pick_up(self) -> None:
        for path in sorted(self.staging.glob("*" + SUFFIX)):
            try:
                shard = read_staged(path)
            except FileNotFoundError:  # it was filed, and now its shard is safe
                continue
            if shard and shard.spec == self._spec and shard.rows[0].sample_key in self._open:
                self._keep(shard, path)

    def _hand_out_again(self, sample: Sample) -> None:
        with self._lock:
            if sample.sample_key in self._open:
                self._queue.appendleft(sample)

    def _checked(self, sample: Sample, path: Path) -> Shard | None:
        """The staged shard, if it is the sample that was asked for, of the states asked for.

        None when there is none for the first time: the engine may have died after its answer, so
        the sample is asked for once more.
        """
        name = f"sample {sample.sample_key[:12]} ({len(sample.input_ids)} tokens)"
        if path.parent != self.staging:
            raise ValueError(
                f"{name}: the engine stages in {path.parent}, not in {self.staging}; start it "
                "with --staging set to that folder, under the same path on both machines"
            )
        wait_for(path)
        if (reason := path.with_suffix(".error")).is_file():
            raise ValueError(f"{name}: {reason.read_text()}")
        if not path.is_file():
            if sample.sample_key in self._unwritten:
                raise ValueError(f"{name}: the engine wrote nothing to {path}; see its log")
            self._unwritten.add(sample.sample_key)
            return None
        try:
            shard = read_shard(path, named=False)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if shard.spec != self._spec:
            raise ValueError(f"{name}: the engine gave {shard.spec}, asked for was {self._spec}")
        if [row.sample_key for row in shard.rows] != [sample.sample_key]:
            raise ValueError(f"{name}: the engine computed other token ids than were sent")
        return shard

    def _keep(self, shard: Shard, path: Path) -> None:
        (row,) = shard.rows
        self._writer.add(next(shard.pieces(path)), staged=True)
        path.with_name(path.name + ".lock").unlink(missing_ok=True)
        with self._lock:
            del self._open[row.sample_key]
        done = self._bar.n + row.num_tokens
        each = self._spec.bytes_per_token / 1e9
        self._bar.set_postfix_str(
            f"{done * each:.2f} of {self.num_tokens * each:.2f} GB", refresh=False
        )
        self._bar.update(row.num_tokens)

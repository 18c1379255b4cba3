"""What DVC takes for the same bytes as a few shards and as one file per sample, paired in one run.

Every round makes two new repositories, one after the other: the bytes as shards, then as files. In
each it times

    add          `dvc add`: hashing, and a copy into the cache
    status       `dvc status`, nothing changed
    push         `dvc push` to an empty remote, a folder on the same disk
    push again   `dvc push`, nothing to do
    pull         `dvc pull` in a new clone with caches of its own

Times are wall-clock seconds of the whole command, DVC's start-up included (a few tenths); what a
step wrote is flushed to disk before the next is timed, outside of both. The page cache is warm. A
network adds its latency once per object, so it widens the gap.

Disk: five times the bytes, in the temporary folder (TMPDIR).

Run      python -m benchmarks.dvc_shards --repeats 3 --json FILE
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

STEPS = ("add", "status", "push", "push again", "pull")


@dataclass(frozen=True)
class Layout:
    """How the bytes lie on disk."""

    name: str
    num_files: int
    file_bytes: int

    def write(self, folder: Path, seed: int) -> None:
        """Fill a new folder; the same seed gives the same bytes, however they are cut."""
        folder.mkdir()
        stream = blocks(seed, self.num_files * self.file_bytes)
        rest = b""
        for i in range(self.num_files):
            with (folder / f"{i:06d}.bin").open("wb") as written:
                missing = self.file_bytes
                while missing:
                    rest = rest or next(stream)
                    piece, rest = rest[:missing], rest[missing:]
                    written.write(piece)
                    missing -= len(piece)


def blocks(seed: int, num_bytes: int, block_bytes: int = 2**20) -> Iterator[bytes]:
    """`num_bytes` that do not compress and hold nothing twice, in blocks."""
    source = random.Random(seed)
    while num_bytes > 0:
        size = min(num_bytes, block_bytes)
        yield source.randbytes(size)
        num_bytes -= size


class Machine:
    """A folder with a home and caches of its own, in which commands run."""

    def __init__(self, folder: Path, link: str | None):
        self.folder = folder
        folder.mkdir()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "GIT_"))}
        self._environment = kept | {
            "HOME": str(folder),
            "DVC_NO_ANALYTICS": "1",
            "DVC_SITE_CACHE_DIR": str(folder / "site-cache"),
            **{f"GIT_{who}_NAME": "bench" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "bench@localhost" for who in ("AUTHOR", "COMMITTER")},
        }
        self._link = link

    @property
    def repository(self) -> Path:
        """Where its repository is."""
        return self.folder / "repository"

    def run(self, *command: str) -> float:
        """Run a command in the repository.

        Returns:
            Wall-clock seconds.

        Raises:
            RuntimeError: when it fails, with what it said.
        """
        started = time.monotonic()
        done = subprocess.run(
            command, cwd=self.repository, env=self._environment, capture_output=True, text=True
        )
        seconds = time.monotonic() - started
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return seconds

    def dvc(self, *command: str) -> float:
        """Run a DVC command; see `run`."""
        return self.run(sys.executable, "-m", "dvc", *command)

    def choose_link(self) -> None:
        """Set what was asked for between cache and workspace."""
        if self._link:
            self.dvc("config", "--local", "cache.type", self._link)


def measure(layout: Layout, scratch: Path, seed: int, link: str | None) -> dict[str, float]:
    """Seconds of every step, in a new repository below `scratch`."""
    home, node = Machine(scratch / "home", link), Machine(scratch / "node", link)
    home.repository.mkdir()
    home.run("git", "init", "--quiet")
    home.dvc("init", "--quiet")
    home.dvc("remote", "add", "--default", "disk", str(scratch / "remote"))
    home.choose_link()
    layout.write(home.repository / "data", seed)
    seconds = {}
    os.sync()
    seconds["add"] = home.dvc("add", "data")
    os.sync()
    seconds["status"] = home.dvc("status")
    seconds["push"] = home.dvc("push")
    os.sync()
    seconds["push again"] = home.dvc("push")
    home.run("git", "add", "--all")
    home.run("git", "commit", "--quiet", "--message", "data")
    home.run("git", "clone", "--quiet", ".", str(node.repository))
    node.choose_link()
    seconds["pull"] = node.dvc("pull")
    arrived = len(list((node.repository / "data").iterdir()))
    if arrived != layout.num_files:
        raise RuntimeError(f"{arrived} of {layout.num_files} files arrived")
    return seconds


def table(layouts: list[Layout], rounds: list[dict[str, dict[str, float]]]) -> str:
    """Markdown: medians with their spread, and the ratio of the two within each round."""
    few, many = layouts

    def cell(values: list[float], digits: int) -> str:
        low, middle, high = min(values), statistics.median(values), max(values)
        return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"

    heads = [
        f"{layout.num_files:,} {layout.name} of {layout.file_bytes / 1e6:g} MB, s"
        for layout in layouts
    ]
    lines = [f"| step | {heads[0]} | {heads[1]} | files / shards |", "| --- | ---: | ---: | ---: |"]
    for step in STEPS:
        pairs = [(row[few.name][step], row[many.name][step]) for row in rounds]
        cells = (
            cell([pair[0] for pair in pairs], 1),
            cell([pair[1] for pair in pairs], 1),
            cell([pair[1] / pair[0] for pair in pairs], 1),
        )
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Measure, print the table and write the JSON that was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=5000, help="files, one per sample")
    parser.add_argument("--kilobytes", type=int, default=200, help="kB of each file (1,000 bytes)")
    parser.add_argument("--shards", type=int, default=20, help="shards that hold the same bytes")
    parser.add_argument("--repeats", type=int, default=3, help="rounds: shards, files; shards, ...")
    parser.add_argument("--link", help="cache.type, e.g. hardlink (default: DVC's own)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time to FILE")
    chosen = parser.parse_args(arguments)
    num_bytes = chosen.files * chosen.kilobytes * 1000
    if min(chosen.files, chosen.kilobytes, chosen.shards, chosen.repeats) < 1:
        parser.error("every number must be at least 1")
    if num_bytes % chosen.shards:
        parser.error(f"{num_bytes:,} bytes do not divide into {chosen.shards} equal shards")
    layouts = [
        Layout("shards", chosen.shards, num_bytes // chosen.shards),
        Layout("files", chosen.files, chosen.kilobytes * 1000),
    ]
    rounds: list[dict[str, dict[str, float]]] = []
    for seed in range(chosen.repeats):
        times = {}
        for layout in layouts:
            with tempfile.TemporaryDirectory(prefix="dvc-shards-") as scratch:
                times[layout.name] = measure(layout, Path(scratch), seed, chosen.link)
            print(f"round {seed + 1}, {layout.name}: {times[layout.name]}", file=sys.stderr)
        rounds.append(times)
    print(table(layouts, rounds))
    if chosen.json:
        result = {
            "link": chosen.link,
            "layouts": [asdict(layout) for layout in layouts],
            "seconds": rounds,
        }
        chosen.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m specmill.store`: look after the store of hidden states."""

import argparse
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from specmill import paths
from specmill.compaction import compact
from specmill.files import digest
from specmill.manifest import MANIFEST, Manifest
from specmill.params_file import load_params
from specmill.samples import read_samples
from specmill.shard_writing import abandoned
from specmill.shards import Piece, Row, StateSpec, damaged_rows, read_shard
from specmill.store import HiddenStateStore
from specmill.verify import check_store, check_view

DESCRIPTION = """\
Look after the store of hidden states (.cache/hidden_states) and its views (data/hidden_states).

The store holds every sample that was ever extracted, under its token ids, verifier, layers and
dtype; `dvc repro extract` takes from it what the dataset needs and extracts only what is missing.
A view is what one dataset needs: DVC tracks, pushes and pulls it.
"""

EPILOG = """\
exit status: 0, 1 when something is damaged or missing, 2 when the command was wrong.
`verify` sets the time of damaged files to now, so that DVC looks at them again: the next
`dvc repro extract` extracts exactly the samples that were lost.
"""


def main() -> None:
    """Run a command."""
    logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stderr)
    options = _parser().parse_args()
    try:
        sys.exit(options.run(options))
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        sys.exit(f"store: {error}")
    except KeyboardInterrupt:
        sys.exit("store: interrupted; nothing that was in it is lost")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specmill.store",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--store", type=Path, default=paths.STORE, help="its folder")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    def command(run: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__[1:], help=what, description=what)
        added.set_defaults(run=run)
        return added

    ls = command(_ls, "what is in the store, by verifier, layers and dtype")
    ls.add_argument(
        "--samples",
        action="store_true",
        help="every sample: store key, checksum, tokens, sample key; equal stores, equal lines",
    )
    command(_stats, "sizes, share in use, bytes a token, one digest to compare stores by")
    verify = command(_verify, "read every byte, name the samples lost; exit 1 if there is damage")
    verify.add_argument("view", type=Path, nargs="?", help="a view instead of the store")
    compact = command(_compact, "keep every sample once, small shards together; loses nothing")
    compact.add_argument(
        "--shard-mib", type=_count, help="default: extract.shard_mib of params.yaml"
    )
    gc = command(_gc, "shards that no view needs: list them, or delete them with --yes")
    gc.add_argument("--keep", type=Path, nargs="+", help="views to keep (default: all of data/)")
    gc.add_argument("--yes", action="store_true", help="delete them")
    add = command(_add, "take a view that was pulled into the store")
    add.add_argument("view", type=Path, nargs="?", default=paths.HIDDEN_STATES)
    pull = command(_pull, "pull hidden states of some training samples, to try a node out")
    pull.add_argument("--samples", type=_count, required=True, metavar="N", help="the first N")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def _open(options: argparse.Namespace) -> HiddenStateStore:
    if not options.store.is_dir():
        raise ValueError(f"there is no store at {options.store}; `dvc repro extract` makes one")
    return HiddenStateStore(options.store)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _ls(options: argparse.Namespace) -> int:
    store = _open(options)
    if options.samples:
        lines = [
            f"{spec.store_key(key)} {piece.row.checksum} {piece.row.num_tokens} {key}"
            for spec, here in store.places.items()
            for key, piece in here.items()
        ]
        for line in sorted(lines):
            _say(line)
        return 0
    _say(f"{'verifier':14}{'layers':18}{'dtype':15}{'samples':>10}{'tokens':>15}{'GB':>11}")
    for spec, here in store.places.items():
        tokens = _num_tokens(here)
        layers = ",".join(map(str, spec.layer_ids))
        _say(
            f"{spec.verifier[:12]:14}{layers:18}{spec.dtype:15}{len(here):>10,}{tokens:>15,}"
            f"{tokens * spec.bytes_per_token / 1e9:>11.3f}"
        )
    return 0


def _num_tokens(here: dict[str, Piece]) -> int:
    return sum(piece.row.num_tokens for piece in here.values())


def _stats(options: argparse.Namespace) -> int:
    store = _open(options)
    rows = [row for shard in store.shards.values() for row in shard.rows]
    there = {name for name in store.shards if (store.folder / name).is_file()}
    size = sum((store.folder / name).stat().st_size for name in there)
    tokens = sum(_num_tokens(here) for here in store.places.values())
    formula = sum(s.bytes_per_token * _num_tokens(here) for s, here in store.places.items())
    in_view = _view_shards(paths.HIDDEN_STATES) if _has_view() else []
    used = sum(store.shards[name].num_bytes for name in there & set(in_view))
    _say(f"shards          {len(there):,} ({len(store.shards) - len(there)} missing)")
    _say(f"bytes           {size:,}")
    _say(f"samples         {sum(map(len, store.places.values())):,} ({len(rows):,} with copies)")
    _say(f"tokens          {tokens:,}")
    if tokens:
        _say(f"bytes a token   {size / tokens:,.1f}, without headers {formula / tokens:,.1f}")
        _say(f"in {paths.HIDDEN_STATES}   {100 * used / size:.1f}% of the bytes")
    _say(f"content digest  {digest(store.contents())}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    lost, num_bytes, whats = (
        check_view(options.view) if options.view else check_store(_open(options))
    )
    for what in whats:
        _say(what)
    for spec, row in lost:
        _say(f"lost: sample {row.sample_key} ({row.num_tokens} tokens of {spec.verifier[:12]})")
    if whats:
        _say(f"{len(whats)} damaged, {len(lost)} samples lost; {_way_back(options, lost)}")
        return 1
    _say(f"every byte is as it was written ({num_bytes / 1e9:.3f} GB)")
    return 0


def _has_view() -> bool:
    return (paths.HIDDEN_STATES / MANIFEST).is_file()


def _way_back(options: argparse.Namespace, lost: list[tuple[StateSpec, Row]]) -> str:
    """How to have them again: from a view that has them, or from an engine."""
    folder = paths.HIDDEN_STATES
    if not options.view and _has_view() and not check_view(folder)[2]:
        view = Manifest(folder)
        if lost and all(s == view.spec and row.sample_key in view.places for s, row in lost):
            return f"{folder} has them: `python -m specmill.store add` brings them back"
    return "the next `dvc repro extract` extracts those it needs again, and only those"


def _compact(options: argparse.Namespace) -> int:
    mib = options.shard_mib or load_params(paths.PARAMS).extract.shard_mib
    _open(options)
    with HiddenStateStore.alone(options.store, wait=False) as store:
        before, after = compact(store, mib * 2**20)
    _say(f"{before} shards before, {after} now")
    return 0


def _view_shards(folder: Path) -> list[str]:
    view = Manifest(folder)
    return [file.name for file in view.files(view.places)]


def _gc(options: argparse.Namespace) -> int:
    _open(options)
    with HiddenStateStore.alone(options.store, wait=False) as store:
        return _collect(store, options)


def _collect(store: HiddenStateStore, options: argparse.Namespace) -> int:
    needed: set[str] = set()
    of_bench = [paths.BENCH_STATES] if paths.BENCH_STATES.exists() else []
    views = options.keep or [paths.HIDDEN_STATES, *of_bench]
    for view in map(Manifest, views):
        if not view.places:
            raise ValueError(f"{view.folder} needs no shard at all; name others")
        if options.yes:  # a damaged copy must not outlive a whole one
            store.drop_damaged(view.spec, view.places)
        # compaction may have put its samples into other shards than it was made of
        here = [key for key in view.places if store.holds(view.spec, key)]
        needed |= {piece.file.name for piece in store.pieces(view.spec, here)}
        needed |= {file.name for file in view.files(view.places)}
    names = [*store.shards, *store.unreadable, *abandoned(store.folder)]
    names = [name for name in names if name not in needed]
    size = sum((store.folder / n).stat().st_size for n in names if (store.folder / n).is_file())
    for name in names:
        samples = len(store.shards[name].rows) if name in store.shards else 0
        _say(f"{name} ({samples} samples)")
    done = "deleted" if options.yes else "would go with --yes"
    if options.yes:
        store.forget(names)
    _say(
        f"{len(names)} shards, {size / 1e9:.3f} GB {done}; what "
        f"{', '.join(map(str, views))} needs is kept"
    )
    return 0


def _add(options: argparse.Namespace) -> int:
    view = Manifest(options.view)
    view.require(view.places)
    files = view.files(view.places)
    with HiddenStateStore.alone(options.store, wait=False) as store:
        return _take(store, files, options)


def _take(store: HiddenStateStore, files: list[Path], options: argparse.Namespace) -> int:
    known = [file.name for file in files if file.name in store.shards]
    whole = set(known) - {damage.name for damage in store.check(known)}
    files = [file for file in files if file.name not in whole]
    for file in files:
        if damaged_rows(read_shard(file), file):
            raise ValueError(f"{file} is damaged; see `verify {options.view}`")
        store.link(file)
    _say(f"{len(files)} shards of {options.view} are in the store now")
    return 0


def _pull(options: argparse.Namespace) -> int:
    def pull(*targets: Path) -> None:
        subprocess.run(["dvc", "pull", *map(str, targets)], check=True)

    pull(paths.PREPARED, paths.VOCAB, paths.VERIFIER_HEAD, paths.HIDDEN_STATES / MANIFEST)
    samples = read_samples(paths.PREPARED / "train.parquet")[: options.samples]
    samples += read_samples(paths.PREPARED / "heldout.parquet")
    view = Manifest(paths.HIDDEN_STATES)
    files = view.files(sample.sample_key for sample in samples)
    pull(*files)
    _say(
        f"{len(files)} of {len(view.files(view.places))} shards are here. Try them:\n"
        f"  set train.max_samples to {options.samples} in params.yaml, then: dvc repro -s train\n"
        "`dvc pull extract` fetches the rest"
    )
    return 0

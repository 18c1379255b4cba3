"""Tidying a store: every sample once, and small shards together."""

from specmill.shards import Piece
from specmill.store import HiddenStateStore


def compact(store: HiddenStateStore, shard_bytes: int) -> tuple[int, int]:
    """Rewrite shards that are small or hold copies; views must be written again to profit from it.

    Every byte is read before anything is deleted, so a damaged copy never survives a whole one.

    Args:
        store: The store; nobody else may add to it meanwhile.
        shard_bytes: Size at which a shard is closed; those below half of it are small.

    Returns:
        Number of shards before and after. What is damaged or gone is forgotten.
    """
    before = len(store.shards)
    for spec, here in list(store.places.items()):
        store.drop_damaged(spec, list(here))
        used: dict[str, list[Piece]] = {}
        for piece in store.places.get(spec, {}).values():
            used.setdefault(piece.file.name, []).append(piece)
        tidy = {
            name
            for name, pieces in used.items()
            if len(pieces) == len(store.shards[name].rows)
            and 2 * store.shards[name].num_bytes >= shard_bytes
        }
        untidy = [n for n, s in store.shards.items() if s.spec == spec and n not in tidy]
        with store.writer(spec, shard_bytes) as writer:
            for name in untidy:
                for piece in used.get(name, []):
                    writer.add(piece)
        rewritten = {piece.file.name for piece in store.places.get(spec, {}).values()}
        store.forget([name for name in untidy if name not in rewritten])
    store.forget([n for n in store.shards if not (store.folder / n).is_file()])
    return before, len(store.shards)

"""What must be the same on all ranks, since that of one is what counts."""

from collections.abc import Mapping, Sequence
from typing import Any

from rft.checkpoint import values
from rft.effects.runtime import Runtime
from rft.errors import BadInput


def require_alike(call: str, everywhere: Sequence[Mapping[str, Any]]) -> None:
    """Raises `BadInput`, on all ranks, where an argument of theirs differs. `everywhere` has those of each rank, by name."""
    first = everywhere[0]
    for rank, own in enumerate(everywhere):
        for name in (name for name in first if own[name] != first[name]):
            both = f"{name} is {first[name]!r} on rank 0 and {own[name]!r} on rank {rank}"
            raise BadInput(f"{call}: {both}; all ranks write or read one and the same: give every rank the same {name}")


def require_one_tree(call: str, runtime: Runtime, plain: values.Plain) -> None:
    """Raises `BadInput`, on all ranks, where they bring different trees: only one of them is kept. Collective."""
    if len(set(runtime.lockstep.gather(plain.digest()))) == 1:
        return
    first, *others = runtime.lockstep.gather(plain.marks)
    ranks = enumerate(others, start=1)
    rank, path = next((rank, path) for rank, marks in ranks for path in sorted(first | marks) if first.get(path) != marks.get(path))
    raise BadInput(
        f"{call}: {path} is {first.get(path)} on rank 0 and {others[rank - 1].get(path)} on rank {rank}; a run is one tree, alike on all "
        "ranks: bring what each rank has of its own together first (all_rows, average)"
    )

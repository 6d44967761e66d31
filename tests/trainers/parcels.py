"""Tensors that are cut over ranks and put together again, for the ranks (`gathers`) and for the tests that compare what they got."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rft.parallel.world import World
from rft.trainers import gathering
from rft.trainers.gathering import Gathering, Piece, assembled, gathered

BUCKETS = (1, 700, 1 << 20)
"""A tensor at a time, a few, and all."""
STOPS = (0, 1, 4)
"""Tensors after which a reader has enough."""
FEW = ("one", "none")
"""What has too few rows to be cut evenly."""


def tensors() -> dict[str, Tensor]:
    """Rows that divide, that do not, fewer than ranks, and none; of several dtypes, one of which nobody casts."""
    draw = torch.Generator().manual_seed(5)
    shapes = {
        "rows": (12, 5),
        "odd": (7, 3),
        "one": (1,),
        "deep": (2, 3, 2),
        "narrow": (5,),
        "none": (0, 4),
        "large": (41, 9),
        "last": (3,),
    }
    made = {name: torch.randn(shape, generator=draw) * 9 for name, shape in shapes.items()}
    return made | {
        "half": torch.randn(10, 3, generator=draw).bfloat16(),
        "count": torch.arange(11),
        "flat": torch.randn(64, generator=draw),
    }


def gathers(world: World) -> Any:
    """What comes with buckets of all sizes, exact and cast; and what is left behind by readers that stop."""
    among = Gathering(group=None, size=world.size, device=world.device)
    seen: dict[str, Any] = {"gathered": {}, "assembled": {}}
    for bucket, dtype in itertools.product(BUCKETS, (None, torch.bfloat16)):
        with_bucket(bucket)
        seen["gathered"][bucket, dtype] = dict(gathered(chunks(world), among, dtype))
        seen["assembled"][bucket, dtype] = dict(assembled(stretches(world), among, dtype))
    with_bucket(700)
    even = [chunk for chunk in chunks(world) if chunk[0] not in FEW]
    seen["stopped"] = [stopped(gathered(even, among), stop) for stop in STOPS if world.size > 1]
    seen["afterwards"] = dict(gathered(chunks(world), among))
    with_bucket(256 << 20)
    return seen


def with_bucket(size: int) -> None:
    gathering.BUCKET = size


def chunks(world: World) -> list[gathering.Shard]:
    return [(name, tuple(whole.shape), mine(whole, world)) for name, whole in tensors().items()]


def mine(whole: Tensor, world: World) -> Tensor:
    parts = whole.chunk(world.size)
    return parts[world.rank] if world.rank < len(parts) else whole[:0]


def stretches(world: World) -> list[Piece]:
    """Cut anywhere, and a number without dimensions."""
    draw, pieces = torch.Generator().manual_seed(6), list[Piece]()
    for name, whole in {**tensors(), "number": torch.tensor(2.5)}.items():
        cuts = torch.randint(0, whole.numel() + 1, (world.size - 1,), generator=draw).sort().values.tolist()
        bounds = tuple(itertools.pairwise([0, *cuts, whole.numel()]))
        pieces.append(Piece(name=name, shape=whole.shape, bounds=bounds, own=whole.reshape(-1)[slice(*bounds[world.rank])]))
    return pieces


class Watched:
    """A collective that tells whether anybody has waited for it."""

    def __init__(self, work: Any) -> None:
        self._work, self.waited = work, False

    def wait(self) -> None:
        self.waited = True
        self._work.wait()


def stopped(stream: Iterator[tuple[str, Tensor]], after: int) -> dict[str, Any]:
    """Reads some tensors of a stream and closes it, as every rank does here."""
    begun, real = list[Watched](), gathering._all_gather

    def watched(*args: Any, **options: Any) -> Watched:
        begun.append(Watched(real(*args, **options)))
        return begun[-1]

    gathering._all_gather = watched
    names = [next(stream)[0] for _ in range(after)]
    ahead = [work.waited for work in begun]
    stream.close()  # pyright: ignore[reportAttributeAccessIssue] (a generator)
    gathering._all_gather = real
    sum_of_ranks = torch.ones(3) * dist.get_rank()
    dist.all_reduce(sum_of_ranks)
    return {"names": names, "ahead": ahead, "waited": [work.waited for work in begun], "sum": float(sum_of_ranks[0])}

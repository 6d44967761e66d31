"""Tensors that are cut over ranks and put together again, for the ranks (`gathers`) and for the tests that compare what they got."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rft.narrow import Narrow, Narrows
from rft.parallel.world import World
from rft.trainers import gathering, pieces
from rft.trainers.gathering import assembled, gathered
from rft.trainers.pieces import Gathering, Piece

BUCKETS = (1, 700, 1 << 20)
"""A tensor at a time, a few, and all."""
STOPS = (0, 1, 4)
"""Tensors after which a reader has enough."""


SLOTS = 11 * pieces.ALIGNMENT
"""Bytes that alignment may add to what a rank is sent by another."""


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
    seen: dict[str, Any] = {"gathered": {}, "assembled": {}, "narrowed": {}, "narrowed stretches": {}}
    narrows = [wanted(rank) for rank in range(world.size)]
    for bucket, dtype in itertools.product(BUCKETS, (None, torch.bfloat16)):
        with_bucket(bucket)
        seen["gathered"][bucket, dtype] = dict(gathered(chunks(world), among, dtype))
        seen["assembled"][bucket, dtype] = dict(assembled(stretches(world), among, dtype))
        seen["narrowed"][bucket, dtype] = dict(gathered(chunks(world), among, dtype, narrows))
        seen["narrowed stretches"][bucket, dtype] = dict(assembled(stretches(world), among, dtype, narrows))
    flat = [chunk for chunk in chunks(world) if len(chunk[1]) < 3]
    seen["arriving"] = arriving(lambda: dict(gathered(flat, among, None, narrows)))
    with_bucket(700)
    even = [chunk for chunk in chunks(world) if chunk[0] in many(world.size)]
    seen["stopped"] = [stopped(gathered(even, among), stop) for stop in STOPS if world.size > 1]
    seen["asked"] = [asked_for(even, among) for _ in range(world.size > 1)]
    seen["afterwards"] = dict(gathered(chunks(world), among))
    with_bucket(256 << 20)
    return seen


def asked_for(shards: Sequence[gathering.Shard], among: Gathering) -> list[str]:
    """Of which tensors the parts have been asked for by the time that the first tensor comes."""
    names = list[str]()

    def each() -> Iterator[gathering.Shard]:
        for shard in shards:
            names.append(shard[0])
            yield shard

    stream = gathered(each(), among)
    _ = next(stream)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue] (a generator)
    return names


def arriving(read: Callable[[], object]) -> int:
    """Bytes that all-to-alls bring to this rank meanwhile; no all-gather brings any."""
    sizes, real = list[int](), dist.all_to_all_single

    def watched(there: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(there.nbytes)
        return real(there, *args, **options)

    with mock.patch.object(dist, "all_to_all_single", watched), mock.patch.object(gathering, "all_gather", None):
        _ = read()
    return sum(sizes)


def slices(shapes: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, Narrow]:
    """What a TP rank of two reads of a model's tensors: columns of what goes back into the residual stream, and rows of the rest."""
    cut = {name: (1 if "o_proj" in name or "down_proj" in name else 0, shape) for name, shape in shapes.items() if "norm" not in name}
    return {name: Narrow(dim, rank % 2 * shape[dim] // 2, (rank % 2 + 1) * shape[dim] // 2) for name, (dim, shape) in cut.items()}


def many(ranks: int) -> list[str]:
    """What has rows enough to be cut evenly: less padding than rows."""
    return [name for name, whole in tensors().items() if -len(whole) % ranks < len(whole)]


def wanted(rank: int) -> Narrows:
    """What a rank wants: rows, columns, planes of a tensor with three dimensions, little and nothing; rank 1 all of one that others cut."""
    asked = {
        "rows": Narrow(1, rank % 4, rank % 4 + 2),
        "odd": Narrow(0, 2 * (rank % 3), 2 * (rank % 3) + 3),
        "deep": Narrow(1 + rank % 2, 1, 2),
        "narrow": Narrow(0, 4, 5),
        "large": Narrow(0, 10 * (rank % 4), 10 * (rank % 4) + 11),
        "half": Narrow(1, rank % 3, rank % 3 + 1),
        "count": Narrow(0, 3 + rank % 4, 3 + rank % 4),
    }
    return {name: narrow for name, narrow in asked.items() if (name, rank) != ("odd", 1)}


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
    begun, real = list[Watched](), gathering.all_gather

    def watched(*args: Any, **options: Any) -> Watched:
        begun.append(Watched(real(*args, **options)))
        return begun[-1]

    gathering.all_gather = watched
    names = [next(stream)[0] for _ in range(after)]
    ahead = [work.waited for work in begun]
    stream.close()  # pyright: ignore[reportAttributeAccessIssue] (a generator)
    gathering.all_gather = real
    sum_of_ranks = torch.ones(3) * dist.get_rank()
    dist.all_reduce(sum_of_ranks)
    return {"names": names, "ahead": ahead, "waited": [work.waited for work in begun], "sum": float(sum_of_ranks[0])}

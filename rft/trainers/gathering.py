"""Tensors of a sharded model, in full or as far as each rank wants them, a bucket at a time.

The ranks' parts of a bucket travel together, packed behind one another: in one all-gather where every rank wants all, in one all-to-all
where some want less. And before a bucket is read the next one is on its way.
On CUDA collectives run on a stream of their own, which the reader's waits for where it must; on a CPU they run in threads.
"""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rft.narrow import UNCUT, Narrows, narrowed
from rft.parallel.messages import all_gather
from rft.trainers.exchange import Exchanged, is_cut_for
from rft.trainers.pieces import Gathering, Piece, copy_each, end, even_bounds, slot

BUCKET = 512 << 20
"""Bytes of full tensors that travel together; a larger tensor has a bucket to itself."""

T = TypeVar("T")
Shard = tuple[str, tuple[int, ...], Tensor]
"""Name, full shape, and this rank's part: chunk number `rank` of dimension 0, as `torch.chunk` over the group cuts it."""
Way = Literal["packed", "exchanged", "scattered"]


def gathered(
    shards: Iterable[Shard], among: Gathering, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in full, on this rank's device, in memory of its own; in the dtype that `Gathering.dtype_of` tells, rounded as a cast
    of the whole would be. Or, where `narrows` has an entry for this rank, that part of it. Collective: exhaust it on every rank. A
    reader that stops earlier leaves nothing on its way.

    On one rank nothing is copied, and the part itself is given, wherever it lies.
    """
    return assembled((_rows(shard, among.size) for shard in shards), among, dtype, narrows)


def assembled(
    pieces: Iterable[Piece], among: Gathering, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()
) -> Iterator[tuple[str, Tensor]]:
    """As `gathered`, of stretches. They are asked for as their bucket is due, so that the first one is on its way at once."""
    wanted = among.of(narrows)
    if among.size == 1:
        yield from narrowed(((piece.name, piece.own.view(piece.shape)) for piece in pieces), wanted[0])
        return
    own, coming = wanted[dist.get_rank(among.group)], None
    try:
        for way, bucket in _alike(pieces, wanted, lambda piece: piece.shape.numel() * among.dtype_of(piece.own.dtype, dtype).itemsize):
            present, coming = coming, _sent(way, bucket, among, dtype, wanted)
            if present is not None:
                yield from _read(present, own)
                present = None  # its memory goes before the next bucket takes any
        if coming is not None:
            yield from _read(coming, own)
    finally:
        if coming is not None:
            coming.wait()


def most(sizes: Sequence[int]) -> int:
    """Bytes that tensors of these sizes take at most on their way, if the reader lets go of each: the bucket that came beside the tensors
    that are made of it (one that has a bucket to itself is made of nothing else), and the next one, which is coming."""
    buckets = [(sum(bucket), 1 if len(bucket) == 1 else 2) for bucket in _buckets(sizes, lambda size: size)]
    coming = [*(size for size, _ in buckets[1:]), 0]
    return max((size * copies + following for (size, copies), following in zip(buckets, coming, strict=False)), default=0)


def _rows(shard: Shard, ranks: int) -> Piece:
    name, shape, part = shard
    whole = torch.Size(shape)
    each = -(-shape[0] // ranks) * whole[1:].numel()
    return Piece(name=name, shape=whole, bounds=even_bounds(whole.numel(), ranks, each), own=part.reshape(-1))


def _is_even(piece: Piece) -> bool:
    """Whether its stretches can travel in slots of one length, with less padding than there is of them."""
    count, ranks, each = piece.shape.numel(), len(piece.bounds), piece.bounds[0][1]
    return piece.bounds == even_bounds(count, ranks, each) and each * ranks < 2 * count


def _way(piece: Piece, wanted: Sequence[Narrows]) -> Way:
    if any(wanted) and is_cut_for(piece, wanted):
        return "exchanged"
    return "packed" if _is_even(piece) else "scattered"


def _alike(pieces: Iterable[Piece], wanted: Sequence[Narrows], size: Callable[[Piece], int]) -> Iterator[tuple[Way, list[Piece]]]:
    """Buckets of pieces that go in the same way."""
    way_of = functools.partial(_way, wanted=wanted)
    for way, same in itertools.groupby(pieces, key=way_of):
        for bucket in _buckets(same, size):
            yield way, bucket


def _buckets(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Neighbours, up to `BUCKET` bytes of them together."""
    bucket, held = list[T](), 0
    for item in items:
        if bucket and held + size(item) > BUCKET:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += size(item)
    if bucket:
        yield bucket


def _sent(way: Way, bucket: Sequence[Piece], among: Gathering, dtype: torch.dtype | None, wanted: Sequence[Narrows]) -> "_Bucket":
    dtypes = [among.dtype_of(piece.own.dtype, dtype) for piece in bucket]
    if way == "exchanged":
        return Exchanged(bucket, dtypes, among, wanted)
    return (_Packed if way == "packed" else _Scattered)(bucket, dtypes, among)


def _read(bucket: "_Bucket", own: Narrows) -> Iterator[tuple[str, Tensor]]:
    bucket.wait()
    names, tensors = [piece.name for piece in bucket.pieces], deque(bucket.tensors())
    yield from narrowed(((name, tensors.popleft()) for name in names), UNCUT if isinstance(bucket, Exchanged) else own)


class _Packed:
    """Evenly cut pieces on their way in one all-gather. A rank's stretch of each has a slot, as long on every rank."""

    def __init__(self, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype], among: Gathering) -> None:
        self.pieces, self._dtypes = pieces, dtypes
        self._stretches = [piece.bounds[0][1] * dtype.itemsize for piece, dtype in zip(pieces, dtypes, strict=True)]
        self._slots = [slot(size) for size in self._stretches]
        self._bytes = torch.empty(among.size, sum(self._slots), dtype=torch.uint8, device=among.device)
        own = self._bytes[dist.get_rank(among.group)]
        self._pack(own)
        self._works: list[Any] = [all_gather(self._bytes.view(-1), own, group=among.group, async_op=True)]

    def wait(self) -> None:
        """Until everything has arrived; see `pieces.end`. Idempotent."""
        end(self._works)

    def tensors(self) -> list[Tensor]:
        """The whole tensors, once: what came is let go. A single one lies as it should already."""
        slots, self._bytes = [self._bytes], torch.empty(0)
        if len(self.pieces) > 1:
            (came,) = slots
            slots = [came.new_empty(len(came), size) for size in self._slots]
            torch.split_with_sizes_copy(came, self._slots, dim=1, out=slots)
        each = zip(self.pieces, self._dtypes, self._stretches, slots, strict=True)
        return [_joined(part, stretch, dtype)[: piece.shape.numel()].view(piece.shape) for piece, dtype, stretch, part in each]

    def _pack(self, own: Tensor) -> None:
        """Casts and copies this rank's stretches to their slots."""
        each = zip(self.pieces, self._dtypes, own.split(self._slots), strict=True)
        pairs = [(part[: p.own.numel() * dtype.itemsize].view(dtype), p.own) for p, dtype, part in each if p.own.numel()]
        copy_each([target for target, _ in pairs], [source for _, source in pairs])


def _joined(slots: Tensor, stretch: int, dtype: torch.dtype) -> Tensor:
    """The first `stretch` bytes of each slot, behind one another."""
    return (slots if slots.shape[1] == stretch else slots[:, :stretch].contiguous()).view(-1).view(dtype)


class _Scattered:
    """Pieces that are cut anyhow, on their way stretch by stretch, from the rank that has it: most lie on one rank, and so does one row."""

    def __init__(self, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype], among: Gathering) -> None:
        self.pieces = pieces
        self._flat = [torch.empty(p.shape.numel(), dtype=d, device=among.device) for p, d in zip(pieces, dtypes, strict=True)]
        self._works = [work for piece, flat in zip(pieces, self._flat, strict=True) for work in _sending(piece, flat, among)]

    def wait(self) -> None:
        """As `_Packed.wait`."""
        end(self._works)

    def tensors(self) -> list[Tensor]:
        """As `_Packed.tensors`."""
        flat, self._flat = self._flat, []
        return [tensor.view(piece.shape) for tensor, piece in zip(flat, self.pieces, strict=True)]


def _sending(piece: Piece, flat: Tensor, among: Gathering) -> list[Any]:
    stretches = [flat[slice(*bounds)] for bounds in piece.bounds]
    _ = stretches[dist.get_rank(among.group)].copy_(piece.own)
    there = [(rank, stretch) for rank, stretch in enumerate(stretches) if len(stretch)]
    return [dist.broadcast(stretch, group=among.group, group_src=rank, async_op=True) for rank, stretch in there]


_Bucket = _Packed | Exchanged | _Scattered

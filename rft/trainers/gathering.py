"""Full tensors of a sharded model, a bucket at a time.

The ranks' parts of a bucket travel in one all-gather, packed behind one another; and before a bucket is read the next one is on its way.
On CUDA collectives run on a stream of their own, which the reader's waits for where it must; on a CPU they run in threads.
"""

import dataclasses as dc
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 256 << 20
"""Bytes of full tensors that travel together; a larger tensor has a bucket to itself."""
ALIGNMENT = 16
"""Bytes: each part of a bucket begins at a multiple, where numbers of any dtype can be read, many at once."""

# The same collective by the name that newer PyTorch gives it, or the one that it deprecates.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
# Many copies in a few launches on a CUDA device.
_copy_each: Any = getattr(torch, "_foreach_copy_")  # noqa: B009

T = TypeVar("T")
Shard = tuple[str, tuple[int, ...], Tensor]
"""Name, full shape, and this rank's part: chunk number `rank` of dimension 0, as `torch.chunk` over the group cuts it."""
Bounds = tuple[tuple[int, int], ...]
"""Of each rank's stretch of a tensor laid out flat: its first number, and the one after its last."""


@dc.dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor laid out flat, of which each rank holds a stretch."""

    name: str
    shape: torch.Size
    bounds: Bounds
    own: Tensor
    """This rank's stretch, wherever it lies."""


@dc.dataclass(frozen=True, kw_only=True)
class Gathering:
    """The ranks that hold the parts of one model between them, and where the whole is to be. `group`: None is all ranks."""

    group: Any
    size: int
    device: torch.device

    def dtype_of(self, held: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
        """In which a tensor comes whose reader will cast it to `wanted`: in that one, if it travels, and has fewer bytes to carry then."""
        smaller = wanted is not None and held.is_floating_point and wanted.itemsize < held.itemsize
        return wanted if wanted is not None and smaller and self.size > 1 else held


def gathered(shards: Sequence[Shard], among: Gathering, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in full, on this rank's device, in memory of its own; in the dtype that `Gathering.dtype_of` tells, rounded as a cast
    of the whole would be. Collective: exhaust it on every rank. A reader that stops earlier leaves nothing on its way.

    On one rank nothing is copied, and the part itself is given, wherever it lies.
    """
    return assembled([_rows(shard, among.size) for shard in shards], among, dtype)


def assembled(pieces: Sequence[Piece], among: Gathering, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """As `gathered`, of stretches."""
    if among.size == 1:
        yield from ((piece.name, piece.own.view(piece.shape)) for piece in pieces)
        return
    coming: _Packed | _Scattered | None = None
    try:
        for bucket in _alike(pieces, lambda piece: piece.shape.numel() * among.dtype_of(piece.own.dtype, dtype).itemsize):
            present, coming = coming, _sent(bucket, among, dtype)
            if present is not None:
                yield from _whole(present)
                present = None  # its memory goes before the next bucket takes any
        if coming is not None:
            yield from _whole(coming)
    finally:
        if coming is not None:
            coming.wait()


def most(sizes: Sequence[int]) -> int:
    """Bytes that tensors of these sizes take at most on their way, if the reader lets go of each: the bucket that came beside the tensors
    that are made of it (one that has a bucket to itself is made of nothing else), and the next one, which is coming."""
    buckets = [(sum(bucket), 1 if len(bucket) == 1 else 2) for bucket in _buckets(sizes, lambda size: size)]
    coming = [*(size for size, _ in buckets[1:]), 0]
    return max((size * copies + following for (size, copies), following in zip(buckets, coming, strict=False)), default=0)


def even_bounds(count: int, ranks: int, each: int | None = None) -> Bounds:
    """Stretches of `count` numbers, all of one length (`each`) but the last ones, as `torch.chunk` cuts."""
    each = -(-count // ranks) if each is None else each
    return tuple((min(rank * each, count), min((rank + 1) * each, count)) for rank in range(ranks))


def _rows(shard: Shard, ranks: int) -> Piece:
    name, shape, part = shard
    whole = torch.Size(shape)
    each = -(-shape[0] // ranks) * whole[1:].numel()
    return Piece(name=name, shape=whole, bounds=even_bounds(whole.numel(), ranks, each), own=part.reshape(-1))


def _is_even(piece: Piece) -> bool:
    """Whether its stretches can travel in slots of one length, with less padding than there is of them."""
    count, ranks, each = piece.shape.numel(), len(piece.bounds), piece.bounds[0][1]
    return piece.bounds == even_bounds(count, ranks, each) and each * ranks < 2 * count


def _alike(pieces: Sequence[Piece], size: Callable[[Piece], int]) -> Iterator[list[Piece]]:
    """Buckets of pieces that are cut in the same way."""
    for _, same in itertools.groupby(pieces, key=_is_even):
        yield from _buckets(list(same), size)


def _buckets(items: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
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


def _sent(bucket: Sequence[Piece], among: Gathering, dtype: torch.dtype | None) -> "_Packed | _Scattered":
    dtypes = [among.dtype_of(piece.own.dtype, dtype) for piece in bucket]
    return (_Packed if _is_even(bucket[0]) else _Scattered)(bucket, dtypes, among)


def _whole(bucket: "_Packed | _Scattered") -> Iterator[tuple[str, Tensor]]:
    bucket.wait()
    names, tensors = [piece.name for piece in bucket.pieces], deque(bucket.tensors())
    yield from ((name, tensors.popleft()) for name in names)


class _Packed:
    """Evenly cut pieces on their way in one all-gather. A rank's stretch of each has a slot, as long on every rank."""

    def __init__(self, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype], among: Gathering) -> None:
        self.pieces, self._dtypes = pieces, dtypes
        self._stretches = [piece.bounds[0][1] * dtype.itemsize for piece, dtype in zip(pieces, dtypes, strict=True)]
        self._slots = [-(-max(size, 1) // ALIGNMENT) * ALIGNMENT for size in self._stretches]
        self._bytes = torch.empty(among.size, sum(self._slots), dtype=torch.uint8, device=among.device)
        own = self._bytes[dist.get_rank(among.group)]
        self._pack(own, among.device)
        self._works: list[Any] = [_all_gather(self._bytes.view(-1), own, group=among.group, async_op=True)]

    def wait(self) -> None:
        """Until everything has arrived; on CUDA the stream that computes waits, not the host. Idempotent."""
        _end(self._works)

    def tensors(self) -> list[Tensor]:
        """The whole tensors, once: what came is let go. A single one lies as it should already."""
        slots, self._bytes = [self._bytes], torch.empty(0)
        if len(self.pieces) > 1:
            (came,) = slots
            slots = [came.new_empty(len(came), size) for size in self._slots]
            torch.split_with_sizes_copy(came, self._slots, dim=1, out=slots)
        each = zip(self.pieces, self._dtypes, self._stretches, slots, strict=True)
        return [_joined(slot, stretch, dtype)[: piece.shape.numel()].view(piece.shape) for piece, dtype, stretch, slot in each]

    def _pack(self, own: Tensor, device: torch.device) -> None:
        """Casts and copies this rank's stretches to their slots, in one go."""
        each = zip(self.pieces, self._dtypes, own.split(self._slots), strict=True)
        there = [(slot[: len(p.own) * dtype.itemsize].view(dtype), p.own) for p, dtype, slot in each if len(p.own)]
        if there:
            _copy_each([slot for slot, _ in there], [part.to(device, non_blocking=True) for _, part in there])


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
        _end(self._works)

    def tensors(self) -> list[Tensor]:
        """As `_Packed.tensors`."""
        flat, self._flat = self._flat, []
        return [tensor.view(piece.shape) for tensor, piece in zip(flat, self.pieces, strict=True)]


def _end(works: list[Any]) -> None:
    """Waits for what was begun, and forgets it: it holds the memory that it wrote to."""
    while works:
        works.pop(0).wait()


def _sending(piece: Piece, flat: Tensor, among: Gathering) -> list[Any]:
    stretches = [flat[first:end] for first, end in piece.bounds]
    _ = stretches[dist.get_rank(among.group)].copy_(piece.own)
    there = [(rank, stretch) for rank, stretch in enumerate(stretches) if len(stretch)]
    return [dist.broadcast(stretch, group=among.group, group_src=rank, async_op=True) for rank, stretch in there]

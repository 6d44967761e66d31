"""Full tensors of a sharded model, a bucket at a time."""

import dataclasses as dc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 256 << 20
"""Bytes of full tensors that are gathered at a time; a larger tensor has a bucket to itself."""

# The same collective by the name that newer PyTorch gives it, or the one that it deprecates.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009

T = TypeVar("T")
Shard = tuple[str, tuple[int, ...], Tensor]
"""Name, full shape, and this rank's part: chunk number `rank` of dimension 0, as `torch.chunk` over the group cuts it."""


@dc.dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor laid out flat, of which each rank holds a stretch: `bounds` has the first and the one after the last, by rank."""

    name: str
    shape: torch.Size
    bounds: tuple[tuple[int, int], ...]
    own: Tensor
    """This rank's stretch, wherever it lies."""


@dc.dataclass(frozen=True, kw_only=True)
class Gathering:
    """The ranks that hold the parts of one model between them, and where the whole is to be. `group`: None is all ranks."""

    group: Any
    size: int
    device: torch.device


def gathered(shards: Sequence[Shard], among: Gathering) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in full, on this rank's device, in memory of its own. Collective: exhaust it on every rank.

    On one rank nothing is copied, and the part itself is given, wherever it lies.
    """
    if among.size == 1:
        yield from ((name, part) for name, _, part in shards)
        return
    for bucket in _buckets(shards, [torch.Size(shape).numel() * part.element_size() for _, shape, part in shards]):
        yield from [(shard[0], _finished(pending, shard[1])) for shard, pending in [(s, _started(s, among)) for s in bucket]]


def assembled(pieces: Sequence[Piece], among: Gathering) -> Iterator[tuple[str, Tensor]]:
    """As `gathered`, of stretches."""
    if among.size == 1:
        yield from ((piece.name, piece.own.view(piece.shape)) for piece in pieces)
        return
    for bucket in _buckets(pieces, [piece.shape.numel() * piece.own.element_size() for piece in pieces]):
        for piece, (pending, whole) in [(piece, _sent(piece, among)) for piece in bucket]:
            for work in pending:
                work.wait()
            yield piece.name, whole.view(piece.shape)


def even_bounds(count: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Stretches of `count` numbers, all of one length but the last ones, as `torch.chunk` cuts."""
    each = -(-count // ranks)
    return tuple((min(rank * each, count), min((rank + 1) * each, count)) for rank in range(ranks))


def _sent(piece: Piece, among: Gathering) -> tuple[list[Any], Tensor]:
    """Begins to exchange one tensor: in one all-gather where it can, else stretch by stretch."""
    count = piece.shape.numel()
    if piece.bounds == even_bounds(count, among.size):
        pending, whole = _started((piece.name, (count,), piece.own), among)
        return [pending], whole[:count]
    whole = torch.empty(count, dtype=piece.own.dtype, device=among.device)
    stretches = [whole[first:end] for first, end in piece.bounds]
    _ = stretches[dist.get_rank(among.group)].copy_(piece.own)
    sending = [(rank, stretch) for rank, stretch in enumerate(stretches) if len(stretch)]
    return [dist.broadcast(stretch, group=among.group, group_src=rank, async_op=True) for rank, stretch in sending], whole


def _buckets(items: Sequence[T], sizes: Sequence[int]) -> Iterator[list[T]]:
    """Neighbours, up to `BUCKET` bytes of them together."""
    filled = itertools.accumulate(sizes)
    for _, bucket in itertools.groupby(zip(filled, items, strict=True), key=lambda pair: (pair[0] - 1) // BUCKET):
        yield [item for _, item in bucket]


def _started(shard: Shard, among: Gathering) -> tuple[Any, Tensor]:
    """Begins one all-gather. Every rank's part is made as long as the first one's, which makes the result contiguous."""
    _, shape, part = shard
    rows = -(-shape[0] // among.size)
    own = part.to(among.device, non_blocking=True)
    if len(own) < rows:
        own = torch.cat([own, own.new_zeros(rows - len(own), *shape[1:])])
    whole = own.new_empty(rows * among.size, *shape[1:])
    return _all_gather(whole, own, group=among.group, async_op=True), whole


def _finished(pending: tuple[Any, Tensor], shape: tuple[int, ...]) -> Tensor:
    work, whole = pending
    work.wait()
    return whole[: shape[0]]

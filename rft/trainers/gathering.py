"""Full tensors of a sharded model, a bucket at a time."""

import dataclasses as dc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 256 << 20
"""Bytes of full tensors that are gathered at a time; a larger tensor has a bucket to itself."""

# The same collective by the name that newer PyTorch gives it, or the one that it deprecates.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009

Shard = tuple[str, tuple[int, ...], Tensor]
"""Name, full shape, and this rank's part: chunk number `rank` of dimension 0, as `torch.chunk` over the group cuts it."""


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
    for bucket in _buckets(shards):
        yield from [(shard[0], _finished(pending, shard[1])) for shard, pending in [(s, _started(s, among)) for s in bucket]]


def _buckets(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    filled = itertools.accumulate(torch.Size(shape).numel() * part.element_size() for _, shape, part in shards)
    for _, bucket in itertools.groupby(zip(filled, shards, strict=True), key=lambda pair: (pair[0] - 1) // BUCKET):
        yield [shard for _, shard in bucket]


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

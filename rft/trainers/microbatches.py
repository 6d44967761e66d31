"""Cuts every rank's rows into as many micro-batches as all the others have, and counts the global batch."""

import dataclasses as dc
from typing import TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float32
from torch import Tensor
from torch.nn.functional import pad

from rft.errors import BadInput
from rft.experience import Minibatch, take
from rft.objectives import MicroBatch, Totals
from rft.parallel.batches import plan
from rft.parallel.world import World
from rft.state import BatchId

T = TypeVar("T")


@dc.dataclass(frozen=True, kw_only=True)
class Share:
    """What the ranks tell each other of their rows before they plan."""

    lengths: tuple[int, ...]
    tokens: int = 0
    sequences: int = 0
    problem: str | None = None


def share_of(mask: Bool[Tensor, "batch seq"], sampled: Bool[Tensor, "batch seq"] | None = None) -> Share:
    """This rank's rows: their lengths, and how much of them was sampled. What is wrong with them is told, not raised."""
    lengths = tuple(mask.sum(dim=1).clamp(min=1).tolist())
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        return Share(lengths=lengths, problem="a row must start at column 0 and have no hole in its mask")
    if sampled is None:
        return Share(lengths=lengths)
    if bool(sampled[:, :1].any()):
        return Share(lengths=lengths, problem="the token at column 0 cannot be sampled: none comes before it")
    return Share(lengths=lengths, tokens=int(sampled.sum()), sequences=int(sampled.any(dim=1).sum()))


def agree(world: World, own: Share, budget: int) -> tuple[tuple[tuple[int, ...], ...], Totals]:
    """Collective: this rank's micro-batches of the common plan, and the totals of the global batch.

    Raises `BadInput` on every rank where any rank's rows cannot be used.
    """
    shares = gather(world, own)
    problems = [f"rank {rank}: {share.problem}" for rank, share in enumerate(shares) if share.problem]
    if problems:
        raise BadInput("; ".join(problems))
    totals = Totals(tokens=sum(share.tokens for share in shares), sequences=sum(share.sequences for share in shares))
    return plan([share.lengths for share in shares], budget)[world.rank], totals


def gather(world: World, own: T) -> list[T]:
    """Collective: what every rank gives, in rank order. It travels by pickle and is to be small."""
    values = [own] * world.size
    if world.size > 1:
        dist.all_gather_object(values, own, group=world.host)
    return values


def cut(batch: Minibatch, old: Float32[Tensor, "batch seq"] | None, rows: tuple[int, ...]) -> MicroBatch:
    """The given rows of `batch`, cut to the longest of them (at least two columns); a filler where there are none."""
    if not rows:
        return _filler(batch, old is not None)
    index = torch.tensor(rows)
    part = take(batch, index)
    width = max(2, int(part.mask.sum(dim=1).max()))
    fitted = {f.name: to_width(getattr(part, f.name), width) for f in dc.fields(part) if _has_columns(getattr(part, f.name))}
    fitted["tokens"] = fitted["tokens"].masked_fill(~fitted["mask"], 0)  # padding may be anything, and a model looks every id up
    return MicroBatch(rows=dc.replace(part, **fitted), old=None if old is None else to_width(old[index], width))


def to_width(value: Tensor, width: int) -> Tensor:
    """Crops `[batch, seq]` to `width` columns, or pads it on the right with zeros."""
    return pad(value, (0, width - value.shape[1]))


def _has_columns(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2


def _filler(batch: Minibatch, with_old: bool) -> MicroBatch:
    """One row of two tokens, neither of them sampled: its loss is 0, and so is its gradient."""
    nothing, one = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    rows = Minibatch(
        batches=batch.batches or (BatchId("filler"),),
        origin=one,
        rows=one,
        tokens=torch.zeros(1, 2, dtype=torch.int64),
        mask=torch.ones(1, 2, dtype=torch.bool),
        sampled=torch.zeros(1, 2, dtype=torch.bool),
        logprobs=nothing,
        groups=one,
        rewards=torch.zeros(1),
        advantages=nothing,
        temperature=torch.ones(1),
        demonstrated=torch.zeros(1, dtype=torch.bool),
        reference=None if batch.reference is None else nothing,
    )
    return MicroBatch(rows=rows, old=nothing if with_old else None)

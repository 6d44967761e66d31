"""Cuts every rank's rows into as many micro-batches as all the others have, and counts the global batch."""

import dataclasses as dc
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor
from torch.nn.functional import pad

from rft.errors import BadInput
from rft.experience import OPTIONAL, Minibatch, take
from rft.images import Placeholder, RowImages, misfit, unmatched
from rft.objectives import MicroBatch
from rft.ops.aggregation import Totals
from rft.parallel.batches import Batches, Layout, Rows, plan
from rft.parallel.messages import gathered
from rft.parallel.world import World
from rft.state import BatchId

T = TypeVar("T")


@dc.dataclass(frozen=True, kw_only=True)
class Share:
    """What the ranks tell each other before they plan: their rows, and what is wrong with them."""

    rows: Rows
    problem: str | None = None
    images: bool = False
    """Whether there are any."""


def share_of(
    tokens: Int64[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    wanted: Bool[Tensor, "batch seq"],
    demonstrated: Bool[Tensor, "batch"] | None = None,
    images: RowImages | None = None,
    *,
    vocab: int,
    placeholder: Placeholder | None = None,
) -> Share:
    """This rank's rows, for a model whose placeholder this is. What is wrong with them is told, not raised.

    A row without tokens counts as one of length 1.
    """
    shown = torch.zeros(len(mask), dtype=torch.bool) if demonstrated is None else demonstrated
    lengths, counts = mask.sum(dim=1).clamp(min=1), wanted.sum(dim=1)
    rows = Rows(lengths=tuple(lengths.tolist()), sampled=tuple(counts.tolist()), demonstrated=tuple(shown.tolist()))
    seeing = any(each is not None for each in images or ())
    problem = _problem(tokens, mask, wanted, vocab) or _unseen(tokens, mask, wanted, images, placeholder)
    return Share(rows=rows, problem=problem, images=seeing)


def _problem(tokens: Tensor, mask: Tensor, wanted: Tensor, vocab: int) -> str | None:
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        return "a row must start at column 0 and have no hole in its mask"
    if bool(wanted[:, :1].any()):
        return "the token at column 0 cannot be sampled: none comes before it"
    if bool((wanted & ~mask).any()):
        return "what is padding cannot be sampled"
    real = tokens[mask]
    if bool(((real < 0) | (real >= vocab)).any()):
        return f"tokens go from {int(real.min())} to {int(real.max())}, and the model's vocabulary from 0 to {vocab - 1}"
    return None


def _unseen(tokens: Tensor, mask: Tensor, wanted: Tensor, images: RowImages | None, placeholder: Placeholder | None) -> str | None:
    if placeholder is None:
        return "rows have images, and this model takes none" if any(images or ()) else None
    images = (None,) * len(tokens) if images is None else images
    if len(images) != len(tokens):
        return f"there are images of {len(images)} rows, and {len(tokens)} rows"
    for row, each in enumerate(images):
        given = tokens[row][mask[row] if each else mask[row] & ~wanted[row]].tolist()  # what was sampled may be a placeholder's id
        if wrong := misfit(given, each, placeholder) if each else unmatched(given, placeholder):
            return f"row {row}: {wrong}"
    return None


@dc.dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks know before the first pass."""

    batches: Batches
    """This rank's micro-batches of the common plan."""
    totals: Totals
    """Of the global batch."""
    seeing: bool
    """Whether any rank has images. Then the vision tower takes part in every pass of every rank, so that none waits for another."""

    def shown(self, images: RowImages | None, rows: Sequence[int]) -> RowImages | None:
        """What a pass over these rows is given, or over the filler where there are none; None: the tower takes no part in it."""
        if not self.seeing:
            return None
        return tuple(None if images is None else images[row] for row in rows) or (None,)


def agree(world: World, own: Share, budget: int, *, width: int, layout: Layout) -> Agreed:
    """Collective: what all ranks tell each other, and what follows from it.

    Raises `BadInput` on every rank where any rank's rows cannot be used.
    """
    shares = gather(world, own)
    problems = [f"rank {rank}: {share.problem}" for rank, share in enumerate(shares) if share.problem]
    if problems:
        raise BadInput("; ".join(problems))
    common = plan([share.rows for share in shares], budget, width=width, layout=layout)
    return Agreed(batches=common.ranks[world.rank], totals=common.totals, seeing=any(share.images for share in shares))


def gather(world: World, own: T) -> list[T]:
    """Collective: what every rank gives, in rank order. It travels by pickle and is to be small."""
    return gathered(own, world.host, world.size)


Asked = tuple[Int64[Tensor, "row seq"], Bool[Tensor, "row seq"], Bool[Tensor, "row seq"], Float32[Tensor, "row"]]
"""Tokens, their mask, those wanted, and the temperature of each row."""


def some_rows(tokens: Tensor, mask: Tensor, wanted: Tensor, temperature: Tensor, rows: tuple[int, ...]) -> Asked:
    """The given rows, cut to the longest of them (at least one column); one of one token that nobody wants where there are none."""
    if not rows:
        one = torch.zeros(1, 1, dtype=torch.int64)
        return one, one == 0, one > 0, torch.ones(1)
    index = torch.tensor(rows)
    width = max(1, int(mask[index].sum(dim=1).max()))
    return to_width(tokens[index], width), to_width(mask[index], width), to_width(wanted[index], width), temperature[index]


def cut(batch: Minibatch, old: Float32[Tensor, "batch seq"] | None, rows: tuple[int, ...]) -> MicroBatch:
    """The given rows of `batch`, cut to the longest of them (at least one column); a filler where there are none."""
    if not rows:
        return _filler(batch, old is not None)
    index = torch.tensor(rows)
    part = dc.replace(take(batch, index), images=None)  # no objective looks at them; the pass is given them apart
    width = max(1, int(part.mask.sum(dim=1).max()))
    fitted = {f.name: to_width(getattr(part, f.name), width) for f in dc.fields(part) if _has_columns(getattr(part, f.name))}
    return MicroBatch(rows=dc.replace(part, **fitted), old=None if old is None else to_width(old[index], width))


def to_width(value: Tensor, width: int) -> Tensor:
    """Crops `[batch, seq]` to `width` columns, or pads it on the right with zeros."""
    return pad(value, (0, width - value.shape[1]))


def _has_columns(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2


def _filler(batch: Minibatch, with_old: bool) -> MicroBatch:
    """One row of one token that was not sampled: its loss is 0, and so is its gradient."""
    nothing, one = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    given: dict[str, Any] = {name: None if getattr(batch, name) is None else nothing for name in OPTIONAL}
    rows = Minibatch(
        batches=batch.batches or (BatchId("filler"),),
        origin=one,
        rows=one,
        tokens=one[None],
        mask=torch.ones(1, 1, dtype=torch.bool),
        sampled=torch.zeros(1, 1, dtype=torch.bool),
        logprobs=nothing,
        groups=one,
        rewards=torch.zeros(1),
        advantages=nothing,
        temperature=torch.ones(1),
        demonstrated=torch.zeros(1, dtype=torch.bool),
        **given,
    )
    return MicroBatch(rows=rows, old=nothing if with_old else None)

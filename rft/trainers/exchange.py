"""Parts of tensors on their way from the ranks that hold them to those that want them, in one all-to-all.

A tensor counts as a matrix here, of its first dimension by all others. Ranks hold stretches of it laid out flat; what one of them
wants is a block of its rows and columns. A block of whole rows may be cut anywhere, any other only between rows. What every rank sends
to every other follows from what all hold and all want, so that nothing has to be agreed on; it is worked out once (`_route`), and a
broadcast only follows it.
"""

import dataclasses as dc
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rft.narrow import Narrow, Narrows
from rft.trainers.pieces import Bounds, Gathering, Piece, copy_each, end, slot


def is_cut_for(piece: Piece, wanted: Sequence[Narrows]) -> bool:
    """Whether a piece can go this way."""
    dims = {narrows[piece.name].dim for narrows in wanted if piece.name in narrows}
    width = _width(piece.shape)
    by_rows = width > 0 and all(edge % width == 0 for stretch in piece.bounds for edge in stretch)
    return len(piece.shape) > 0 and (dims <= {0} or (dims <= {0, 1} and by_rows))


class Exchanged:
    """Pieces on their way, of which each rank gets what it wants. `wanted`: of each rank of the group."""

    def __init__(self, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype], among: Gathering, wanted: Sequence[Narrows]) -> None:
        self.pieces, self._dtypes, self._device = pieces, dtypes, among.device
        forms = tuple(
            _Form(shape=piece.shape, itemsize=dtype.itemsize, bounds=piece.bounds, wanted=tuple(each.get(piece.name) for each in wanted))
            for piece, dtype in zip(pieces, dtypes, strict=True)
        )
        self._route = _route(forms, dist.get_rank(among.group))
        self._came, there = (torch.empty(sum(sizes), dtype=torch.uint8, device=among.device) for sizes in self._route.splits)
        packed = _typed(there, dtypes)
        copies = [(target.of(packed[dtypes[n]]), source.of(pieces[n].own)) for n, target, source in self._route.packed]
        copy_each([target for target, _ in copies], [source for _, source in copies])
        self._works: list[Any] = [dist.all_to_all_single(self._came, there, *self._route.splits, group=among.group, async_op=True)]

    def wait(self) -> None:
        """Until everything has arrived; see `pieces.end`. Idempotent."""
        end(self._works)

    def tensors(self) -> list[Tensor]:
        """What this rank wants of each piece, once: what came is let go."""
        came, self._came = _typed(self._came, self._dtypes), torch.empty(0)
        mine = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in zip(self._route.shapes, self._dtypes, strict=True)]
        copies = [(target.of(mine[n]), source.of(self.pieces[n].own)) for n, target, source in self._route.kept]
        copies += [(target.of(mine[n]), source.of(came[self._dtypes[n]])) for n, target, source in self._route.arrived]
        copy_each([target for target, _ in copies], [source for _, source in copies])
        return mine


def _typed(data: Tensor, dtypes: Iterable[torch.dtype]) -> Mapping[torch.dtype, Tensor]:
    return {dtype: data.view(dtype) for dtype in set(dtypes)}


@dc.dataclass(frozen=True)
class _Form:
    """A piece without its numbers: what it takes on its way, who holds what of it, and what each rank wants of it."""

    shape: torch.Size
    itemsize: int
    bounds: Bounds
    wanted: tuple[Narrow | None, ...]


@dc.dataclass(frozen=True)
class _View:
    """Numbers of a tensor, from the one at `start` of it laid out flat."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.start)

    def at(self, start: int) -> "_View":
        """As many in this shape, behind one another."""
        return _View(self.size, (self.size[-1], 1)[-len(self.size) :], start)


_Copy = tuple[int, _View, _View]
"""The number of a piece, the target and the source."""


@dc.dataclass(frozen=True, kw_only=True)
class _Route:
    """What one rank does with the pieces of a bucket."""

    splits: tuple[list[int], list[int]]
    """Bytes that come from each rank, and that go to each."""
    shapes: list[torch.Size]
    """Of what this rank wants."""
    packed: list[_Copy]
    """From its stretches into what goes."""
    kept: list[_Copy]
    """From its stretches into what it wants."""
    arrived: list[_Copy]
    """From what came into what it wants."""


@dc.dataclass(frozen=True, kw_only=True)
class _Block:
    """Rows `first` to `end` and columns `left` to `right` of a matrix of a width."""

    first: int
    end: int
    left: int
    right: int
    width: int

    @property
    def numel(self) -> int:
        return (self.end - self.first) * (self.right - self.left)

    def met(self, stretch: tuple[int, int]) -> tuple[int, int]:
        """Where in the block, laid out flat, what it has of a stretch begins and ends."""
        across = self.right - self.left
        if across == self.width:
            low, high = (min(max(edge - self.first * self.width, 0), self.numel) for edge in stretch)
        else:
            low, high = ((min(max(edge // self.width, self.first), self.end) - self.first) * across for edge in stretch)
        return low, high

    def read(self, stretch: tuple[int, int]) -> _View:
        """What the block has of a stretch, in the numbers of the stretch."""
        (low, high), across = self.met(stretch), self.right - self.left
        if across == self.width:
            return _View((high - low,), (1,), self.first * self.width + low - stretch[0])
        start = (self.first + low // across) * self.width - stretch[0] + self.left
        return _View(((high - low) // across, across), (self.width, 1), start)


@functools.lru_cache(maxsize=4096)
def _route(forms: tuple[_Form, ...], own: int) -> _Route:
    """What rank `own` of the group does with pieces of these forms."""
    ranks = range(len(forms[0].bounds))
    others = [rank for rank in ranks if rank != own]
    blocks = [[_block(form, form.wanted[rank]) for form in forms] for rank in ranks]
    packed, kept, arrived = list[_Copy](), list[_Copy](), list[_Copy]()
    coming, going = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    for reader, (n, form) in ((reader, item) for reader in others for item in enumerate(forms)):
        view = blocks[reader][n].read(form.bounds[own])
        packed.append((n, view.at(sum(going.values()) // form.itemsize), view))
        going[reader] += slot(_count(view) * form.itemsize)
    for holder, (n, form) in ((holder, item) for holder in others for item in enumerate(forms)):
        low, high = blocks[own][n].met(form.bounds[holder])
        flat = _View((high - low,), (1,), low)
        arrived.append((n, flat, flat.at(sum(coming.values()) // form.itemsize)))
        coming[holder] += slot((high - low) * form.itemsize)
    for n, form in enumerate(forms):
        view = blocks[own][n].read(form.bounds[own])
        kept.append((n, view.at(blocks[own][n].met(form.bounds[own])[0]), view))
    packed, kept, arrived = ([copy for copy in copies if _count(copy[2])] for copies in (packed, kept, arrived))
    shapes = [form.shape if cut is None else cut.shape(form.shape) for form in forms for cut in [form.wanted[own]]]
    splits = list(coming.values()), list(going.values())
    return _Route(splits=splits, shapes=shapes, packed=packed, kept=kept, arrived=arrived)


def _count(view: _View) -> int:
    return torch.Size(view.size).numel()


def _block(form: _Form, narrow: Narrow | None) -> _Block:
    rows, width = form.shape[0], _width(form.shape)
    if narrow is None or narrow.dim == 0:
        first, last = (0, rows) if narrow is None else (narrow.first, narrow.end)
        return _Block(first=first, end=last, left=0, right=width, width=width)
    inner = width // form.shape[1]
    return _Block(first=0, end=rows, left=narrow.first * inner, right=narrow.end * inner, width=width)


def _width(shape: torch.Size) -> int:
    return shape[1:].numel()

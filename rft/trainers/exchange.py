"""Parts of tensors on their way from the ranks that hold them to those that want them, in one all-to-all.

A tensor counts as a matrix here, of its first dimension by all others. Ranks hold stretches of it laid out flat; what one of them
wants is a block of its rows and columns. A block of whole rows may be cut anywhere, any other only between rows. What every rank sends
to every other follows from what all hold and all want, so that nothing has to be agreed on.
"""

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rft.narrow import Narrow, Narrows, shape_in
from rft.trainers.pieces import Gathering, Piece, copy_each, end, slot


def is_cut_for(piece: Piece, wanted: Sequence[Narrows]) -> bool:
    """Whether a piece can go this way."""
    dims = {narrows[piece.name].dim for narrows in wanted if piece.name in narrows}
    width = _width(piece.shape)
    by_rows = width > 0 and all(edge % width == 0 for stretch in piece.bounds for edge in stretch)
    return len(piece.shape) > 0 and (dims <= {0} or (dims <= {0, 1} and by_rows))


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

    @property
    def is_whole_rows(self) -> bool:
        return self.right - self.left == self.width

    def met(self, stretch: tuple[int, int]) -> tuple[int, int]:
        """Where in the block, laid out flat, what it has of a stretch begins and ends."""
        if self.is_whole_rows:
            low, high = (min(max(edge - self.first * self.width, 0), self.numel) for edge in stretch)
        else:
            rows = (min(max(edge // self.width, self.first), self.end) - self.first for edge in stretch)
            low, high = (row * (self.right - self.left) for row in rows)
        return low, high

    def read(self, stretch: tuple[int, int], own: Tensor) -> Tensor:
        """What the block has of a stretch, a view of `own`, the numbers of the stretch."""
        low, high = self.met(stretch)
        if self.is_whole_rows:
            start = self.first * self.width - stretch[0]
            return own[start + low : start + high]
        start = self.first - stretch[0] // self.width
        rows = slice(start + low // (self.right - self.left), start + high // (self.right - self.left))
        return own.view(-1, self.width)[rows, self.left : self.right]


def _block(piece: Piece, narrow: Narrow | None) -> _Block:
    rows, width = piece.shape[0], _width(piece.shape)
    if narrow is None or narrow.dim == 0:
        first, last = (0, rows) if narrow is None else (narrow.first, narrow.end)
        return _Block(first=first, end=last, left=0, right=width, width=width)
    inner = width // piece.shape[1]
    return _Block(first=0, end=rows, left=narrow.first * inner, right=narrow.end * inner, width=width)


def _width(shape: torch.Size) -> int:
    return shape[1:].numel()


class Exchanged:
    """Pieces on their way, of which each rank gets what it wants. `wanted`: of each rank of the group."""

    def __init__(self, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype], among: Gathering, wanted: Sequence[Narrows]) -> None:
        self.pieces, self._dtypes, self._device, self._rank = pieces, dtypes, among.device, dist.get_rank(among.group)
        self._blocks = [[_block(piece, narrows.get(piece.name)) for piece in pieces] for narrows in wanted]
        self._shapes = [shape_in(wanted[self._rank], piece.name, piece.shape) for piece in pieces]
        others = [rank for rank in range(among.size) if rank != self._rank]
        self._coming = {rank: self._slots(rank, self._rank) for rank in others}
        going = {rank: self._slots(self._rank, rank) for rank in others}
        self._came, there = (self._room(slots) for slots in (self._coming, going))
        self._pack(there, going)
        splits = [[sum(slots.get(rank, ())) for rank in range(among.size)] for slots in (self._coming, going)]
        self._works: list[Any] = [dist.all_to_all_single(self._came, there, *splits, group=among.group, async_op=True)]

    def wait(self) -> None:
        """Until everything has arrived; see `pieces.end`. Idempotent."""
        end(self._works)

    def tensors(self) -> list[Tensor]:
        """What this rank wants of each piece, once: what came is let go."""
        came, self._came = self._came, torch.empty(0)
        mine = [
            torch.empty(block.numel, dtype=dtype, device=self._device)
            for block, dtype in zip(self._blocks[self._rank], self._dtypes, strict=True)
        ]
        pairs = [*self._kept(mine), *self._arrived(mine, came)]
        copy_each([target for target, _ in pairs], [source for _, source in pairs])
        return [tensor.view(shape) for tensor, shape in zip(mine, self._shapes, strict=True)]

    def _kept(self, mine: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pairs (target, source) of what this rank has itself."""
        sources = [self._read(number, self._rank) for number in range(len(self.pieces))]
        return [(self._target(number, mine, self._rank).view(own.shape), own) for number, own in enumerate(sources) if own.numel()]

    def _arrived(self, mine: Sequence[Tensor], came: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs (target, source) of what the others sent."""
        parts = came.split([size for slots in self._coming.values() for size in slots])
        places = [(number, rank) for rank in self._coming for number in range(len(self.pieces))]
        found = [(self._target(number, mine, rank), part, self._dtypes[number]) for (number, rank), part in zip(places, parts, strict=True)]
        return [(target, part[: target.nbytes].view(dtype)) for target, part, dtype in found if len(target)]

    def _pack(self, there: Tensor, going: dict[int, list[int]]) -> None:
        """Casts and copies what this rank sends to its places."""
        parts = there.split([size for slots in going.values() for size in slots])
        places = [(number, rank) for rank in going for number in range(len(self.pieces))]
        found = [(self._read(number, rank), part, self._dtypes[number]) for (number, rank), part in zip(places, parts, strict=True)]
        pairs = [(part[: own.numel() * dtype.itemsize].view(dtype).view(own.shape), own) for own, part, dtype in found if own.numel()]
        copy_each([target for target, _ in pairs], [source for _, source in pairs])

    def _target(self, number: int, mine: Sequence[Tensor], holder: int) -> Tensor:
        """Where what `holder` has of a piece belongs in what this rank wants of it."""
        low, high = self._blocks[self._rank][number].met(self.pieces[number].bounds[holder])
        return mine[number][low:high]

    def _read(self, number: int, reader: int) -> Tensor:
        """What this rank has of what `reader` wants of a piece."""
        piece = self.pieces[number]
        return self._blocks[reader][number].read(piece.bounds[self._rank], piece.own)

    def _slots(self, holder: int, reader: int) -> list[int]:
        """Bytes that go from one rank to another, piece by piece."""
        edges = [block.met(piece.bounds[holder]) for block, piece in zip(self._blocks[reader], self.pieces, strict=True)]
        return [slot((high - low) * dtype.itemsize) for (low, high), dtype in zip(edges, self._dtypes, strict=True)]

    def _room(self, slots: dict[int, list[int]]) -> Tensor:
        return torch.empty(sum(map(sum, slots.values())), dtype=torch.uint8, device=self._device)

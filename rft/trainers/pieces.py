"""What the ranks hold of a model between them: of each tensor, laid out flat, a stretch each."""

import dataclasses as dc
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft.narrow import UNCUT, Narrows

ALIGNMENT = 16
"""Bytes: each part of a buffer begins at a multiple, where numbers of any dtype can be read, many at once."""

Bounds = tuple[tuple[int, int], ...]
"""Of each rank's stretch of a tensor laid out flat: its first number, and the one after its last."""

# Many copies in a few launches on a CUDA device.
_copy_each: Any = getattr(torch, "_foreach_copy_")  # noqa: B009


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
    """The ranks that hold the parts of one model between them, and where what they read is to be. `group`: None is all ranks."""

    group: Any
    size: int
    device: torch.device
    first: int = 0
    """The first of the ranks among all; the others are its neighbours."""

    def dtype_of(self, held: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
        """In which a tensor comes whose reader will cast it to `wanted`: in that one, if it travels, and has fewer bytes to carry then."""
        smaller = wanted is not None and held.is_floating_point and wanted.itemsize < held.itemsize
        return wanted if wanted is not None and smaller and self.size > 1 else held

    def of(self, narrows: Sequence[Narrows]) -> Sequence[Narrows]:
        """What is said of these ranks; `narrows` is of all, or empty."""
        return narrows[self.first : self.first + self.size] or [UNCUT] * self.size


@functools.lru_cache(maxsize=4096)
def even_bounds(count: int, ranks: int, each: int | None = None) -> Bounds:
    """Stretches of `count` numbers, all of one length (`each`) but the last ones, as `torch.chunk` cuts."""
    each = -(-count // ranks) if each is None else each
    return tuple((min(rank * each, count), min((rank + 1) * each, count)) for rank in range(ranks))


def slot(size: int) -> int:
    """Bytes that are put by for a part of `size` bytes."""
    return -(-max(size, 1) // ALIGNMENT) * ALIGNMENT


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Casts and copies each source, wherever it lies, to its target: those that are alike in one go."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kind = target.dtype, source.dtype, target.stride() == source.stride()  # a single one that is not would have all go one by one
        there, here = alike.setdefault(kind, ([], []))
        there.append(target)
        here.append(source.to(target.device, non_blocking=True))
    for there, here in alike.values():
        _copy_each(there, here)


def end(works: list[Any]) -> None:
    """Waits for collectives that were begun, and forgets them: they hold the memory that they write to.

    On CUDA the stream that computes waits, not the host.
    """
    while works:
        works.pop(0).wait()

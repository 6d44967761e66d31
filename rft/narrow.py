"""Which part of a tensor is wanted, where it is not all of it: a stretch of one dimension, as tensor parallelism cuts."""

import dataclasses as dc
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor


@dc.dataclass(frozen=True)
class Narrow:
    """Indices `first` to `end` (exclusive) of dimension `dim`, and of the other dimensions all."""

    dim: int
    first: int
    end: int

    def of(self, whole: Tensor) -> Tensor:
        """That part, a view."""
        return whole.narrow(self.dim, self.first, self.end - self.first)

    def shape(self, whole: Sequence[int]) -> torch.Size:
        """Of that part of a tensor of shape `whole`."""
        return torch.Size([*whole[: self.dim], self.end - self.first, *whole[self.dim + 1 :]])


Narrows = Mapping[str, Narrow]
"""By the names of tensors; what has no entry is wanted whole."""
UNCUT: Narrows = MappingProxyType({})
"""Everything is wanted whole."""


def shape_in(narrows: Narrows, name: str, whole: Sequence[int]) -> torch.Size:
    """The shape of what is wanted of the tensor `name`."""
    return narrows[name].shape(whole) if name in narrows else torch.Size(whole)


def narrowed(tensors: Iterator[tuple[str, Tensor]], narrows: Narrows) -> Iterator[tuple[str, Tensor]]:
    """Of whole tensors what is wanted of each. The memory behind is that of the whole ones."""
    for name, tensor in tensors:
        yield name, narrows[name].of(tensor) if name in narrows else tensor
        del tensor  # the reader may have let go of it, and the next one needs memory

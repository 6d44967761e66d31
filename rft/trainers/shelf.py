"""Moves tensors between device and host by their storage, so that every alias of them (a shard, its flat parameter) moves along."""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

ALIGNMENT = 16
"""Bytes: each copy on the host begins at a multiple, where a number of any dtype can be read."""


class Shelf:
    """A fixed set of contiguous tensors, no two sharing a storage, that lie on their device or, after `put`, on the host.

    While they are on the host their storage is empty: what reads one fails instead of getting what it held. On CUDA the host memory
    is pinned and kept for the next time; it is registered in place, since the pinned allocator rounds up to a power of two.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self._first = list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in self._sizes), initial=0))
        self._places = {key(tensor): place for place, tensor in enumerate(tensors)}
        self._cuda = any(tensor.is_cuda for tensor in tensors)
        self._host: Tensor | None = None
        self.away = False

    @property
    def bytes(self) -> int:
        """What the tensors take on the device when they are there."""
        return sum(self._sizes)

    def put(self) -> None:
        """Copies everything to the host, and gives the device's memory back to the driver. Idempotent."""
        if self.away:
            return
        if self._host is None:
            self._host = _host_memory(self._first[-1], pinned=self._cuda)
        for place, tensor in enumerate(self._tensors):
            _ = self._copy(place).copy_(_raw(tensor.untyped_storage()), non_blocking=True)
        self._settle()
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self.away = True
        if self._cuda:
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Copies everything back, bit for bit. Idempotent."""
        if not self.away:
            return
        for place, tensor in enumerate(self._tensors):
            tensor.untyped_storage().resize_(self._sizes[place])
            _ = _raw(tensor.untyped_storage()).copy_(self._copy(place), non_blocking=True)
        self._settle()
        self.away = False
        if not self._cuda:
            self._host = None

    def readable(self) -> list[Tensor]:
        """The tensors themselves or, while they are away, their copies on the host, which may be written too."""
        return [self.here(tensor) for tensor in self._tensors]

    def here(self, tensor: Tensor) -> Tensor:
        """One of the tensors, or of those that share a storage with one: itself or, while it is away, its copy on the host."""
        place = self._places.get(key(tensor))
        if not self.away or place is None:
            return tensor
        copy = self._copy(place).view(tensor.dtype)
        # Strides count from the storage's start, and all copies share one storage.
        return copy.as_strided(tensor.shape, tensor.stride(), copy.storage_offset() + tensor.storage_offset())

    def close(self) -> None:
        """Lets the tensors and the host memory go. Idempotent."""
        self._host, self._tensors, self._sizes, self._places, self.away = None, (), [], {}, False

    def _copy(self, place: int) -> Tensor:
        assert self._host is not None
        return self._host[self._first[place] : self._first[place] + self._sizes[place]]

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def key(tensor: Tensor) -> int:
    """The same for all tensors of one storage, wherever it has been moved."""
    storage: Any = tensor.untyped_storage()
    address: int = storage._cdata
    return address


def _cudart() -> Any:
    return torch.cuda.cudart()


def _raw(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_memory(size: int, *, pinned: bool) -> Tensor:
    memory = torch.empty(size, dtype=torch.uint8)
    if pinned and size:
        torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), size, 0))
        # Memory that is freed while it is registered makes later copies fail, from whatever comes to lie at the same addresses.
        _ = weakref.finalize(memory, _cudart().cudaHostUnregister, memory.data_ptr())
    return memory

"""Moves tensors between device and host by their storage, so that every alias of them (a shard, its flat parameter) moves along."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage


class Shelf:
    """A fixed set of contiguous tensors, no two sharing a storage, that lie on their device or, after `put`, on the host.

    While they are on the host their storage is empty: what reads one fails instead of getting what it held. On CUDA the host memory
    is pinned and kept for the next time; it is registered in place, since the pinned allocator rounds up to a power of two.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
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
            self._host = _host_memory(self.bytes, pinned=self._cuda)
        storages = [tensor.untyped_storage() for tensor in self._tensors]
        for storage, part in zip(storages, self._host.split(self._sizes), strict=True):
            _ = part.copy_(_raw(storage), non_blocking=True)
        self._settle()
        for storage in storages:
            storage.resize_(0)
        self.away = True
        if self._cuda:
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Copies everything back, bit for bit. Idempotent."""
        if self._host is None or not self.away:
            return
        for tensor, size, part in zip(self._tensors, self._sizes, self._host.split(self._sizes), strict=True):
            tensor.untyped_storage().resize_(size)
            _ = _raw(tensor.untyped_storage()).copy_(part, non_blocking=True)
        self._settle()
        self.away = False
        if not self._cuda:
            self._host = None

    def readable(self) -> list[Tensor]:
        """The tensors themselves or, while they are away, their copies on the host."""
        if self._host is None or not self.away:
            return list(self._tensors)
        parts = self._host.split(self._sizes)
        return [_like(part, tensor) for part, tensor in zip(parts, self._tensors, strict=True)]

    def close(self) -> None:
        """Lets the tensors and the host memory go. Idempotent."""
        if self._host is not None and self._cuda:
            torch.cuda.check_error(_cudart().cudaHostUnregister(self._host.data_ptr()))
        self._host, self._tensors, self._sizes = None, (), []

    def _settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _cudart() -> Any:
    return torch.cuda.cudart()


def _raw(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _like(part: Tensor, tensor: Tensor) -> Tensor:
    first = tensor.storage_offset()
    return part.view(tensor.dtype)[first : first + tensor.numel()].view(tensor.shape)


def _host_memory(size: int, *, pinned: bool) -> Tensor:
    memory = torch.empty(size, dtype=torch.uint8)
    if pinned and size:
        torch.cuda.check_error(_cudart().cudaHostRegister(memory.data_ptr(), size, 0))
    return memory

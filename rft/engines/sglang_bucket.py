"""Memory that a rank and a TP rank of SGLang share: tensors go through it, one after the other, without being serialised.

On CUDA it is one allocation, opened in the other process by its handle; on a CPU it is a file in memory. The rank packs tensors behind
one another, cast to the engine's dtype, and starts again at the beginning: a part is written again only when the other side has
acknowledged it, which it does when its device has read it.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import connection, reduction
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from rft.ops.transfer import transfer

Link = connection.Connection  # of two processes on one machine
ALIGNMENT = 256
"""Tensors begin at multiples of this many bytes, so that kernels read them in whole words."""
PARTS = 4
"""The bucket is handed over in so many parts about: while one is read, the next one is filled."""

Entry = tuple[str, tuple[int, ...], int]
"""A tensor in the bucket: its name, its shape, and the byte that it begins at."""


def needed(shapes: Iterable[torch.Size], dtype: torch.dtype, most: int) -> int:
    """Bytes of a bucket of at most `most`, unless one tensor is larger; and of no more than all of them together."""
    sizes = [_aligned(shape.numel() * dtype.itemsize) for shape in shapes]
    return max(*sizes, min(most, sum(sizes)), ALIGNMENT)


class Bucket:
    """The rank's side."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self._file = None if device.type == "cuda" else os.memfd_create("rft-bucket")
        if self._file is None:
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            os.ftruncate(self._file, size)
            self._memory = _mapped(self._file, size)

    def offer(self, link: Any) -> None:
        """Gives the other side a handle; `accept` takes it there."""
        if self._file is None:
            _, arguments = reductions.reduce_tensor(self._memory)
            link.send(arguments)
        else:
            link.send(len(self._memory))
            reduction.send_handle(link, self._file, 0)

    def close(self) -> None:
        """Gives the memory back; the other side must have let it go."""
        self._memory = torch.empty(0)
        if self._file is not None:
            os.close(self._file)
        else:
            torch.cuda.ipc_collect()

    def pack(
        self, tensors: Iterable[tuple[str, Tensor]], hand_over: Callable[[list[Entry]], None], wait: Callable[[], None]
    ) -> Mapping[str, int]:
        """Casts and packs a stream of tensors, and hands them over part by part; `wait` returns when the oldest part has been read.

        Returns the checksums of what was packed.
        """
        packing = _Packing(self, hand_over, wait)
        for name, tensor in tensors:
            packing.add(name, tensor)
        return packing.finish()

    def write(self, pairs: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Callable[[], None]]:
        """Writes tensors at their bytes; returns their checksums, unwaited for, and what waits until it is done."""
        sums = transfer((_view(self._memory, at, tensor.shape, self.dtype), tensor) for at, tensor in pairs)
        if self._device.type != "cuda":
            return sums, _nothing
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(self._device))
        return sums, written.synchronize

    def __len__(self) -> int:
        return len(self._memory)

    def size_of(self, tensor: Tensor) -> int:
        """Bytes that a tensor takes in it."""
        return _aligned(tensor.numel() * self.dtype.itemsize)


class _Packing:
    """One run of a stream through a bucket: where the next tensor goes, and which bytes the other side may still be reading.

    A part is handed over when it has been written, which is waited for only when the next one is being written, too.
    """

    def __init__(self, bucket: Bucket, hand_over: Callable[[list[Entry]], None], wait: Callable[[], None]) -> None:
        self._bucket, self._hand_over, self._wait = bucket, hand_over, wait
        self._head = 0
        self._part = list[tuple[str, int, Tensor]]()
        self._written = deque[tuple[list[Entry], Callable[[], None]]]()
        self._unread = deque[tuple[int, int]]()
        """The bytes of parts that were written and not read yet, handed over or not."""
        self._names, self._sums = list[str](), list[Tensor]()

    def add(self, name: str, tensor: Tensor) -> None:
        """Finds a place for a tensor; what is in the way is handed over and waited for."""
        size = self._bucket.size_of(tensor)
        if self._head + size > len(self._bucket):
            self._write()
            self._head = 0
        if self._part and self._head - self._part[0][1] + size > len(self._bucket) // PARTS:
            self._write()
        while any(first < self._head + size and last > self._head for first, last in self._unread):
            self._take_back()
        self._part.append((name, self._head, tensor))
        self._head += size

    def finish(self) -> Mapping[str, int]:
        """Hands over the rest, and waits until all of it has been read."""
        self._write()
        while self._unread:
            self._take_back()
        sums = torch.cat(self._sums).tolist() if self._sums else []
        return dict(zip(self._names, sums, strict=True))

    def _write(self) -> None:
        if self._part:
            sums, done = self._bucket.write([(at, tensor) for _, at, tensor in self._part])
            self._sums.append(sums)
            self._names += [name for name, _, _ in self._part]
            self._unread.append((self._part[0][1], self._head))
            self._written.append(([(name, tuple(tensor.shape), at) for name, at, tensor in self._part], done))
            self._part = []
            self._send(all_but=1)

    def _send(self, *, all_but: int) -> None:
        while len(self._written) > all_but:
            entries, done = self._written.popleft()
            done()
            self._hand_over(entries)

    def _take_back(self) -> None:
        if len(self._written) == len(self._unread):  # nothing of it has been handed over
            self._send(all_but=len(self._written) - 1)
        self._wait()
        _ = self._unread.popleft()


def _nothing() -> None:
    """There is nothing to wait for."""


def accept(link: Any) -> Tensor:
    """The other side's view of a bucket that is offered: its bytes."""
    offered = link.recv()
    if not isinstance(offered, int):
        rebuild: Any = reductions.rebuild_cuda_tensor
        return rebuild(*offered)
    file = reduction.recv_handle(link)
    try:
        return _mapped(file, offered)
    finally:
        os.close(file)


def unpacked(memory: Tensor, entries: Iterable[Entry], dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """The tensors in a bucket, where they lie."""
    return [(name, _view(memory, at, torch.Size(shape), dtype)) for name, shape, at in entries]


def _view(memory: Tensor, at: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return memory[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

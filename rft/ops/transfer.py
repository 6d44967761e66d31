"""Casting, copying and summing up in one pass over the memory, for many tensors at a time.

A broadcast is as fast as memory is read and written. Cast, copy and checksum one after the other would read and write it three times;
here one kernel reads the sources, casts, writes the targets, and adds the cast words to the checksums of `ops.checksum` on the way.
Where there is no CUDA device, or a part is not contiguous, torch's own operators do the same, one after the other.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from rft.ops.checksum import COLUMNS, WORD, checksum, multipliers

Pair = tuple[Tensor, Tensor]
"""(target, source), of the same shape."""

BATCH = 1024 << 20
"""Bytes of sources that are waited for before a launch; so many are held at a time."""
WORDS, ROUNDS, WARPS = 512, 32, 4
"""A program of the kernel takes ROUNDS times WORDS words; WORDS is less than `COLUMNS`, so that it passes their end once a round. These
were the fastest of those that `tests.benchmarks.sync_kernels` tries on an H200."""


def transfer(pairs: Iterable[Pair]) -> Int64[Tensor, "pair"]:
    """Writes every source into its target, cast to its dtype; returns the checksums of what was written, unwaited for."""
    sums, batch, held = list[Tensor](), list[Pair](), 0
    for target, source in pairs:
        batch.append((target, source.to(target.device)))
        held += source.nbytes
        if held >= BATCH:
            sums.append(Table(batch).run(store=True))
            batch, held = [], 0
        del target, source  # what was written goes before the next one takes memory
    if batch or not sums:
        sums.append(Table(batch).run(store=True))
    return torch.cat(sums)


def standing(tensors: Sequence[Tensor]) -> Int64[Tensor, "tensor"]:
    """The checksums of what lies in tensors, by one read of their memory, unwaited for."""
    return reading(tensors).run(store=False)


def reading(tensors: Sequence[Tensor]) -> "Table":
    """What `standing` needs, made once for tensors that do not move."""
    return Table([(tensor, tensor) for tensor in tensors])


class Table:
    """Pairs that are gone through together, with what the kernel is told of them; good for as long as nothing moves."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = list(pairs)
        fused: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        self._single = list[int]()
        for number, (target, source) in enumerate(pairs):
            alike = fused.setdefault((source.dtype, target.dtype), []) if _can_be_fused(target, source) else self._single
            alike.append(number)
        self._launches = [(numbers, _Launch([pairs[number] for number in numbers])) for numbers in fused.values()]

    def run(self, *, store: bool) -> Int64[Tensor, "pair"]:
        """Casts and copies (`store`), or reads the targets alone; the checksums of these in the order of the pairs, unwaited for."""
        if not self._pairs:
            return torch.zeros(0, dtype=torch.int64)
        if len(self._launches) == 1 and not self._single:
            return self._launches[0][1].run(store=store)
        totals = torch.zeros(len(self._pairs), dtype=torch.int64, device=self._pairs[0][0].device)
        for number in self._single:
            totals[number] = _one(*self._pairs[number], store=store)
        for numbers, launch in self._launches:
            totals[_sent(numbers, totals.device)] = launch.run(store=store)
        return totals


def _one(target: Tensor, source: Tensor, *, store: bool) -> Int64[Tensor, ""]:
    if not store:
        return checksum(target)
    cast = source.to(target.dtype)
    _ = target.copy_(cast)
    return checksum(cast)


def _can_be_fused(target: Tensor, source: Tensor) -> bool:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    whole = target.nbytes % WORD == 0 and target.data_ptr() % WORD == 0 and target.numel() > 0
    plain = target.is_contiguous() and source.is_contiguous() and target.dtype in floats and source.dtype in floats
    return target.is_cuda and source.is_cuda and whole and plain


class _Launch:
    """One launch for pairs of the same two dtypes, by kernel; in the order of `pairs`."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        target, source = pairs[0]
        rows = tuple((s.data_ptr(), t.data_ptr(), t.nbytes) for t, s in pairs)
        self._jobs, self._owners, self._begin = _told(rows, WORDS * ROUNDS, target.device)
        self._factors = multipliers(target.device)
        self._kinds, self._words = (source.dtype, target.dtype), (WORD // target.itemsize, COLUMNS, WORDS, ROUNDS)

    def run(self, *, store: bool) -> Int64[Tensor, "pair"]:
        """As `Table.run`."""
        from rft.ops.transfer_kernel import cast_copy_sum

        totals = self._begin.clone()
        kinds = [_kind(dtype) for dtype in self._kinds]
        launch: Any = cast_copy_sum[(len(self._owners),)]
        launch(self._jobs, self._owners, self._factors, totals, *kinds, store, *self._words, num_warps=WARPS)
        return totals


@functools.lru_cache(maxsize=128)
def _told(rows: tuple[tuple[int, int, int], ...], of_program: int, device: torch.device) -> Sequence[Tensor]:
    """What the kernel is told of pairs (see `transfer_kernel`): jobs, owners, and the checksums' beginnings.

    Of each pair it is given where source and target lie and the target's bytes, and how many words a program takes. From one broadcast to
    the next tensors mostly lie where they lay.
    """
    sources, targets, sizes = np.array(rows, dtype=np.int64).T
    words = sizes // WORD
    programs = -(-words // of_program)
    jobs = np.stack([sources, targets, words, programs.cumsum() - programs], axis=1).reshape(-1)
    owners = np.arange(len(rows)).repeat(programs)
    begin = sizes * multipliers(torch.device("cpu"))[0].numpy()  # modulo 2^64, as all of it
    # In one copy: each operator on the device would take longer to launch than to run. The kernel is compiled for pointers to multiples
    # of 16 bytes, as all that it is given are: what only is copied comes last.
    parts = [jobs, owners, begin]
    return _sent(np.concatenate(parts), device).split([len(part) for part in parts])


def _sent(numbers: Sequence[int] | np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Integers on the device, without waiting for what it is doing: only pinned memory is copied that way."""
    return torch.as_tensor(numbers, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


def _kind(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]

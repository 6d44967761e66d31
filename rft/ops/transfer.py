"""Casting, copying and summing up in one pass over the memory, for many tensors at a time.

A broadcast is as fast as memory is read and written. Cast, copy and checksum one after the other would read and write it three times;
here one kernel reads the sources, casts, writes the targets, and adds the cast words to the checksums of `ops.checksum` on the way.
Where there is no CUDA device, or a part is not contiguous, torch's own operators do the same, one after the other.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from rft.ops.checksum import COLUMNS, WORD, checksum, multipliers

Pair = tuple[Tensor, Tensor]
"""(target, source), of the same shape."""

BATCH = 1 << 30
"""Bytes of sources that are waited for before a launch; so many are held at a time."""
WORDS, ROUNDS = 512, 8
"""A program of the kernel takes ROUNDS times WORDS words; WORDS is less than `COLUMNS`, so that it passes their end once a round."""


def transfer(pairs: Iterable[Pair]) -> Int64[Tensor, "pair"]:
    """Writes every source into its target, cast to its dtype; returns the checksums of what was written, unwaited for."""
    sums, batch, held = list[Tensor](), list[Pair](), 0
    for target, source in pairs:
        batch.append((target, source.to(target.device)))
        held += source.nbytes
        if held >= BATCH:
            sums.append(_each(batch, store=True))
            batch, held = [], 0
    if batch or not sums:
        sums.append(_each(batch, store=True))
    return torch.cat(sums)


def standing(tensors: Sequence[Tensor]) -> Int64[Tensor, "tensor"]:
    """The checksums of what lies in tensors, by one read of their memory, unwaited for."""
    return _each([(tensor, tensor) for tensor in tensors], store=False)


def _each(pairs: Sequence[Pair], *, store: bool) -> Int64[Tensor, "pair"]:
    """By kernel where it can be, by torch elsewhere; in the order of `pairs`."""
    if not pairs:
        return torch.zeros(0, dtype=torch.int64)
    totals = torch.zeros(len(pairs), dtype=torch.int64, device=pairs[0][0].device)
    fused: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for number, (target, source) in enumerate(pairs):
        if _can_be_fused(target, source):
            fused.setdefault((source.dtype, target.dtype), []).append(number)
        else:
            totals[number] = _one(target, source, store=store)
    for numbers in fused.values():
        totals[_sent(numbers, totals.device)] = _launch([pairs[number] for number in numbers], store=store)
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


def _launch(pairs: Sequence[Pair], *, store: bool) -> Int64[Tensor, "pair"]:
    """One launch for pairs of the same two dtypes."""
    from rft.ops.transfer_kernel import cast_copy_sum

    target, source = pairs[0]
    words = [t.nbytes // WORD for t, _ in pairs]
    programs = [-(-count // (WORDS * ROUNDS)) for count in words]
    starts = [0, *itertools.accumulate(programs)][:-1]
    rows = [(s.data_ptr(), t.data_ptr(), count, start) for (t, s), count, start in zip(pairs, words, starts, strict=True)]
    jobs, counts = _sent(rows, target.device), _sent(programs, target.device)
    owners = torch.arange(len(pairs), device=target.device).repeat_interleave(counts, output_size=sum(programs))
    factors = multipliers(target.device)
    totals = _sent([t.nbytes for t, _ in pairs], target.device) * factors[0]
    kinds = (_kind(source.dtype), _kind(target.dtype))
    cast_copy_sum[(sum(programs),)](jobs, owners, factors, totals, *kinds, store, WORD // target.itemsize, COLUMNS, WORDS, ROUNDS)
    return totals


def _sent(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Integers on the device, without waiting for what it is doing: only pinned memory is copied that way."""
    return torch.tensor(numbers, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


def _kind(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]

"""Casting, copying and summing up in one pass over the memory.

A broadcast is as fast as memory is read and written. Cast, copy and checksum one after the other would read and write it three times;
here one kernel reads the source, casts, writes the target, and adds the cast words to the checksum of `ops.checksum` on the way.
Where there is no CUDA device, or the parts are not contiguous, torch's own operators do the same, one after the other.
"""

from jaxtyping import Int64
from torch import Tensor

from rft.ops.checksum import COLUMNS, WORD, checksum, multipliers

WORDS = 1024
"""Of one program of the kernel; less than `COLUMNS`, so that a program passes the end of the multipliers once at most."""


def transfer(target: Tensor, source: Tensor) -> Int64[Tensor, ""]:
    """Writes `source` [any shape] into `target` (same shape), cast to its dtype; returns the checksum of what was written, unwaited for."""
    if _fused(target, source):
        return _launch(target, source, store=True)
    cast = source.to(target.dtype)
    _ = target.copy_(cast)
    return checksum(cast)


def standing(tensor: Tensor) -> Int64[Tensor, ""]:
    """The checksum of what lies in a tensor, by one read of its memory, unwaited for."""
    return _launch(tensor, tensor, store=False) if _fused(tensor, tensor) else checksum(tensor)


def _fused(target: Tensor, source: Tensor) -> bool:
    return target.is_cuda and source.is_cuda and target.is_contiguous() and source.is_contiguous() and target.itemsize in (2, 4)


def _launch(target: Tensor, source: Tensor, *, store: bool) -> Int64[Tensor, ""]:
    factors = multipliers(target.device)
    total = factors[0] * target.nbytes
    per_word = WORD // target.itemsize
    programs = -(-target.numel() // (per_word * WORDS))
    if programs:
        from rft.ops.transfer_kernel import cast_copy_sum

        cast_copy_sum[(programs,)](source, target, factors, total, target.numel(), store, per_word, COLUMNS, WORDS)
    return total

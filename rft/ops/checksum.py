"""Checksums of tensors: exact, position-sensitive, and as fast as one read of the memory.

A tensor's bytes are read as little-endian 64-bit words w_0, w_1, …, the last one padded with zeros. With C = 4093 columns and
fixed pseudo-random odd multipliers m_0 … m_{C-1}, the checksum is

    Σ_i w_i · m_{i mod C} + m_0 · (number of bytes)        (modulo 2^64)

An odd factor is invertible, so a change of one word always shows; two changes cancel with a chance of about 2^-63. C is a prime, so
that blocks whose sizes are powers of two (heads, fused projections, experts) never land on the same columns when they are swapped.
Since integers add exactly in any order, the sums may be taken in pieces: `column_sums` of the pieces, `fold` at the end.
"""

import functools

import torch
from jaxtyping import Int64
from torch import Tensor

COLUMNS = 4093
"""Words that have a multiplier of their own."""
WORD = 8
"""Bytes of a word."""


def checksum(tensor: Tensor) -> Int64[Tensor, ""]:
    """The checksum of a tensor's bytes in row-major order, whatever its strides; int64 on its device, without waiting for it."""
    words, factors = _words(tensor), multipliers(tensor.device)
    whole = len(words) - len(words) % COLUMNS
    sums = words[:whole].view(-1, COLUMNS).sum(0)
    sums[: len(words) - whole] += words[whole:]
    return (sums * factors).sum() + factors[0] * tensor.nbytes


@functools.cache
def multipliers(device: torch.device) -> Int64[Tensor, "4093"]:
    """The factors m_0 … m_{C-1} of the module's head, on a device."""
    generator = torch.Generator().manual_seed(0x5EED)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (COLUMNS,), generator=generator, dtype=torch.int64)
    return (drawn | 1).to(device)


def _words(tensor: Tensor) -> Int64[Tensor, "word"]:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(data) - len(data) % WORD
    if data.data_ptr() % WORD or whole != len(data):
        padded = data.new_zeros(-(-len(data) // WORD) * WORD)
        padded[: len(data)] = data
        data = padded
    return data.view(torch.int64)

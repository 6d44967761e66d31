"""The kernel of `ops.transfer`, in Triton; imported where there is a CUDA device."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def cast_copy_sum(
    source: Any,
    target: Any,
    factors: Any,
    total: Any,
    elements: Any,
    STORE: tl.constexpr,
    PER_WORD: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """One program: WORDS words of PER_WORD elements each; adds their products with the factors to `total`, modulo 2^64."""
    first = tl.program_id(0).to(tl.int64) * WORDS
    word, lane = tl.arange(0, WORDS), tl.arange(0, PER_WORD)
    index = (first + word)[:, None] * PER_WORD + lane[None, :]
    inside = index < elements
    cast = tl.load(source + index, mask=inside, other=0.0).to(target.dtype.element_ty)
    if STORE:
        tl.store(target + index, cast, mask=inside)
    if PER_WORD == 4:
        bits = cast.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    else:
        bits = cast.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    words = tl.sum(bits << (lane * (64 // PER_WORD)).to(tl.int64)[None, :], axis=1)
    column = (first % COLUMNS).to(tl.int32) + word
    column = tl.where(column >= COLUMNS, column - COLUMNS, column)
    _ = tl.atomic_add(total, tl.sum(words * tl.load(factors + column), axis=0))

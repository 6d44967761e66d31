"""The kernels of `ops.transfer`, in Triton; imported where there is a CUDA device.

Many tensors share one launch. A row of `jobs` is (address of the source, address of the target, words of the target, first program);
`owners` has the job of each program. A program takes ROUNDS · WORDS words of its job, one word being 8 bytes of the target.
"""

# A kernel's arguments must not be annotated, and what Triton makes of them no type checker knows.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

import triton
import triton.language as tl


@triton.jit
def cast_copy_sum(
    jobs,
    owners,
    factors,
    totals,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    STORE: tl.constexpr,
    PER_WORD: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Casts and copies (STORE), or reads the target alone; adds the words' products with the factors to the job's total."""
    job = tl.load(owners + tl.program_id(0))
    source = tl.load(jobs + job * 4).to(tl.pointer_type(SOURCE))
    target = tl.load(jobs + job * 4 + 1).to(tl.pointer_type(tl.int64))
    length = tl.load(jobs + job * 4 + 2)
    first = (tl.program_id(0) - tl.load(jobs + job * 4 + 3)) * (WORDS * ROUNDS)
    lane = tl.arange(0, PER_WORD)
    total = tl.zeros([WORDS], dtype=tl.int64)
    for _ in range(ROUNDS):
        word = first + tl.arange(0, WORDS)
        inside = word < length
        if STORE:
            index = word[:, None] * PER_WORD + lane[None, :]
            cast = tl.load(source + index, mask=inside[:, None], other=0.0).to(TARGET)
            if PER_WORD == 4:
                bits = cast.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
            else:
                bits = cast.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
            words = tl.sum(bits << (lane * (64 // PER_WORD)).to(tl.int64)[None, :], axis=1)
            tl.store(target + word, words, mask=inside)
        else:
            words = tl.load(target + word, mask=inside, other=0)
        column = (first % COLUMNS).to(tl.int32) + tl.arange(0, WORDS)
        column = tl.where(column >= COLUMNS, column - COLUMNS, column)
        total += words * tl.load(factors + column)
        first += WORDS
    _ = tl.atomic_add(totals + job, tl.sum(total, axis=0))

"""Other forms of the kernel that installs weights and sums them up, beside the library's own: on a CUDA device, for `sync`.

Each is measured over the pairs of a plan with its tables made once, so that what differs is the kernel and how it is launched.
"""

# A kernel's arguments must not be annotated, and what Triton makes of them no type checker knows.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from rft.ops import transfer, transfer_kernel
from rft.ops.transfer import Pair, Table, reading

OWN: Any = transfer_kernel.cast_copy_sum
SHAPES = ((512, 32, 4), (512, 8, 4), (512, 16, 4), (512, 64, 4), (512, 128, 4), (1024, 4, 4), (1024, 16, 4), (1024, 16, 8), (2048, 8, 8))
"""Words and rounds of a program, and its warps; the library's own first."""


@triton.jit
def aligned(
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
    """`cast_copy_sum`, told that every address is a multiple of 16: a compiler that does not know it loads number by number."""
    job = tl.load(owners + tl.program_id(0))
    source = tl.multiple_of(tl.load(jobs + job * 4).to(tl.pointer_type(SOURCE)), 16)
    target = tl.multiple_of(tl.load(jobs + job * 4 + 1).to(tl.pointer_type(tl.int64)), 16)
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


def forms(pairs: Sequence[Pair], median_ms: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """Milliseconds of each form to write all pairs and to read them again; the checksums of each are held against the library's."""
    expected = transfer.transfer(pairs).tolist()
    found = dict[str, float]()
    is_aligned = all(tensor.data_ptr() % 16 == 0 for pair in pairs for tensor in pair)
    for name, kernel in {"own": OWN, **({"aligned": aligned} if is_aligned else {})}.items():
        for shape in SHAPES:
            with_form(kernel, shape)
            writing, again = Table(pairs), reading([target for target, _ in pairs])
            assert writing.run(store=True).tolist() == expected == again.run(store=False).tolist(), (kernel, shape)
            form = f"{name}_{'_'.join(map(str, shape))}"
            found[f"{form}_write_ms"] = median_ms(lambda writing=writing: writing.run(store=True).tolist())
            found[f"{form}_read_ms"] = median_ms(lambda again=again: again.run(store=False).tolist())
    with_form(OWN, SHAPES[0])
    return found


def with_form(kernel: Any, shape: tuple[int, int, int]) -> None:
    """What `transfer` launches from now on."""
    transfer_kernel.cast_copy_sum = kernel
    transfer.WORDS, transfer.ROUNDS, transfer.WARPS = shape

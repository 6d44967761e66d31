"""Log-probs from hidden states and head, forward and backward: `head_scores` beside the naive form and beside kernel libraries.

    python -m tests.benchmarks.head

On a CUDA device 8 × 4096 tokens in bf16, at a vocabulary of 151,936 and three widths; elsewhere 1 × 512 tokens at one width, in fp32 and
bf16. All forms run in one process over the same tensors; a library that is not installed has no row, and one that fails says so. The
kernels and every form are compared with double precision before anything is timed. The last form in each table asks for the entropy's
gradient too, which no other computes. Appends to results/head.jsonl.
"""

import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rft.ops import scores
from rft.ops.scores import head_scores
from tests.benchmarks.record import append
from tests.ops.test_scores import naive as exact

VOCAB, GIB = 151_936, 2**30
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TOKENS, WIDTHS, DTYPES = (8 * 4096, (896, 2048, 3584), ("bfloat16",)) if CUDA else (512, (896,), ("float32", "bfloat16"))
WARM_UPS, REPEATS = (2, 7) if CUDA else (1, 3)
Form = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden, weight, targets) to what is differentiated: the targets' log-probs, or their negatives."""


def main() -> None:
    """Checks, then one table per width and dtype."""
    if CUDA:
        check_kernels()
    tables = [table(width, getattr(torch, dtype)) for width in WIDTHS for dtype in DTYPES]
    for title, rows in tables:
        print(f"\n{title}\n{'form':44}{'ms':>9}{'peak GiB':>10}{'error of log-prob':>19}{'hidden grad':>13}{'weight grad':>13}")
        for name, row in rows.items():
            cells = (f"{row[key]:>{width}.{digits}}" if key in row else " " * width for key, width, digits in COLUMNS)
            print(f"{name:44}" + (row["failed"] if "failed" in row else "".join(cells)))


WITH_ENTROPY = "rft: head_scores, with entropy's gradient"
COLUMNS = (("ms", 9, "1f"), ("peak_gib", 10, "2f"), ("logprob_error", 19, "1e"), ("hidden_error", 13, "1e"), ("weight_error", 13, "1e"))


def table(width: int, dtype: torch.dtype) -> tuple[str, dict[str, dict[str, Any]]]:
    """Every form's row, each kept as soon as it is there."""
    title, rows = f"{TOKENS} tokens, vocabulary {VOCAB}, width {width}, {dtype}", dict[str, dict[str, Any]]()
    few, reference = draw(min(TOKENS, 1024), width, dtype), None
    for name, form in forms():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries deprecate is theirs to mend
            try:
                reference = reference or in_double(*few)
                row = {} if name == WITH_ENTROPY else errors(gradients(form, *few), reference, sign=-1 if "−" in name else 1)
                row |= measured(form, *draw(TOKENS, width, dtype))
            except Exception as error:  # noqa: BLE001  # whatever a library raises is what its row says
                row = {"failed": f"{type(error).__name__}: {str(error)[:160]}".replace("\n", " ")}
        rows[name.strip("−")] = row
        print(title, name, row, flush=True)
        append("head", {"tokens": TOKENS, "vocab": VOCAB, "width": width, "dtype": str(dtype), "form": name.strip("−"), **row})
    return title, rows


# ---- the forms ----


def forms() -> Iterator[tuple[str, Form]]:
    """By name; a name that begins with − gives the negative log-prob."""
    yield "naive: float, / T, log_softmax, gather", naive
    yield "−naive: cross_entropy of the fp32 logits", lambda h, w, t: F.cross_entropy((h @ w.T).float(), t, reduction="none")
    yield "rft: head_scores", ours
    yield from libraries()
    yield WITH_ENTROPY, lambda h, w, t: sum(head_scores(h, w, t, torch.ones(len(h), device=DEVICE)))


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What is written where there is no kernel."""
    return ((hidden @ weight.T).float() / 1.0).log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probs alone are used; the entropies are computed all the same."""
    return head_scores(hidden, weight, targets, torch.ones(len(hidden), device=DEVICE))[0]


def libraries() -> Iterator[tuple[str, Form]]:
    """Those that give log-probs per token, with gradients per token, and are installed."""
    try:
        from trl.trainer.utils import _ChunkedLogProbFunction as Chunked

        yield "TRL: its chunks of 2048 × 8192", lambda h, w, t: Chunked.apply(h, w, None, t, 1.0, 8192)[0]
    except ImportError as error:
        print("no TRL:", error)
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Linear
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction as Scaled

        yield "−Liger: fused scaled cross-entropy", lambda h, w, t: Scaled.apply(h, w, t)
        if CUDA:
            yield "−Liger: fused linear cross-entropy", lambda h, w, t: Linear.apply(h, w, t, *LIGER)[0]
    except ImportError as error:
        print("no Liger:", error)
    try:
        from cut_cross_entropy import linear_cross_entropy

        if CUDA:
            yield "−CCE: gradients below 2⁻¹² dropped", lambda h, w, t: linear_cross_entropy(h, w, t, reduction="none")
            yield "−CCE: no gradient dropped", lambda h, w, t: linear_cross_entropy(h, w, t, reduction="none", filter_eps=None)
    except ImportError as error:
        print("no CCE:", error)
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions()
        yield "−torch: linear_cross_entropy", lambda h, w, t: F.linear_cross_entropy(h, w, t, reduction="none", options=options)


LIGER = (None, None, -100, 0.0, 0.0, "none")
"""No bias, no class weights, the ignored index, no z-loss, no smoothing, per token."""


# ---- figures ----


def draw(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of deviation 3, and targets that mostly are likely, as sampled tokens are."""
    weight = torch.randn(VOCAB, width, device=DEVICE) * 3 / width**0.5
    targets = torch.randint(0, VOCAB, (tokens,), device=DEVICE)
    towards = weight[targets] * torch.empty(tokens, 1, device=DEVICE).uniform_(1.2, 2.4)
    hidden = torch.randn(tokens, width, device=DEVICE) + towards
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def gradients(form: Form, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """(values, gradient of hidden, of weight) for a fixed weighting of the tokens."""
    hidden.grad = weight.grad = None
    values = form(hidden, weight, targets)
    values.backward(torch.linspace(-1, 1, len(targets), device=DEVICE).to(values.dtype))
    assert hidden.grad is not None
    assert weight.grad is not None
    return values.detach(), hidden.grad, weight.grad


def in_double(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """The same of the same numbers, in double precision from the beginning to the end."""
    wide = (each.detach().double().requires_grad_() for each in (hidden, weight))
    return gradients(lambda h, w, t: exact(h, w, t, torch.ones(len(t), device=DEVICE))[0], *wide, targets)


def errors(found: tuple[Tensor, ...], reference: tuple[Tensor, ...], *, sign: int) -> dict[str, float]:
    """‖found − reference‖ / ‖reference‖ of each."""
    names = ("logprob_error", "hidden_error", "weight_error")
    return {name: relative(sign * one, two) for name, one, two in zip(names, found, reference, strict=True)}


def relative(found: Tensor, reference: Tensor) -> float:
    """In double precision; NaN where either has one."""
    return float((found.double() - reference.double()).norm() / reference.double().norm())


def measured(form: Form, hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, float]:
    """Median time of forward and backward, and the most memory beyond the inputs, gradients included."""
    times, before = list[float](), 0
    for _ in range(WARM_UPS + REPEATS):
        hidden.grad = weight.grad = None
        before, start = memory_reset(), now()
        gradients(form, hidden, weight, targets)
        times.append(now() - start)
    return {"ms": round(1e3 * statistics.median(times[WARM_UPS:]), 2), "peak_gib": round((peak() - before) / GIB, 3)}


def now() -> float:
    """Seconds, when the device has done what it was given; of this process alone on a CPU, which others may use too."""
    if not CUDA:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def memory_reset() -> int:
    """Bytes in use; the peak begins anew."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    _ = Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """The most bytes in use since."""
    return torch.cuda.max_memory_allocated() if CUDA else _status("VmHWM")


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


# ---- the kernels, before anything is timed ----


def check_kernels() -> None:
    """Values and gradients on fresh inputs, in blocks and whole, with everything that `head_scores` can be asked for."""
    chunk, narrow = scores.CHUNK, scores.NARROW
    for chunk_now, narrow_now in ((chunk, narrow), (1, 256)):
        scores.CHUNK, scores.NARROW = chunk_now, narrow_now
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for tokens, width, vocab in ((300, 64, 1000), (77, 128, 10_007)):
                for softcap, biased in ((None, False), (None, True), (4.0, True)):
                    _check(tokens, width, vocab, dtype, softcap, biased=biased)
    scores.CHUNK, scores.NARROW = chunk, narrow
    print("the kernels agree with double precision", flush=True)


def _check(tokens: int, width: int, vocab: int, dtype: torch.dtype, softcap: float | None, *, biased: bool) -> None:
    case: dict[str, Any] = {
        "hidden": torch.randn(tokens, width, device=DEVICE).to(dtype).requires_grad_(),
        "weight": (torch.randn(vocab, width, device=DEVICE) * 3 / width**0.5).to(dtype).requires_grad_(),
        "targets": torch.randint(0, vocab, (tokens,), device=DEVICE),
        "temperature": torch.empty(tokens, device=DEVICE).uniform_(0.5, 1.5).where(torch.rand(tokens, device=DEVICE) < 0.9, 0.0),
        "bias": torch.randn(vocab, device=DEVICE).to(dtype).requires_grad_() if biased else None,
        "softcap": softcap,
    }
    given = [each for each in (case["hidden"], case["weight"], case["bias"]) if each is not None]
    rubbish = torch.full((2**24,), torch.nan, device=DEVICE)  # what is not written is seen
    del rubbish
    ours_now, expected = head_scores(**case), exact(**case)
    factors = torch.randn(2, tokens, device=DEVICE)
    for used in ((True, False), (False, True), (True, True)):
        found, right = (
            torch.autograd.grad(
                [result for result, wanted in zip(results, used, strict=True) if wanted],
                given,
                [factor.to(results[0].dtype) for factor, wanted in zip(factors, used, strict=True) if wanted],
                retain_graph=True,
            )
            for results in (ours_now, expected)
        )
        for one, two in zip(found, right, strict=True):
            _close(one, two, {torch.float32: 1e-5}.get(dtype, 1e-2), (tokens, width, vocab, dtype, softcap, biased, used))
    for one, two in zip(ours_now, expected, strict=True):
        _close(one, two, 1e-5, (tokens, width, vocab, dtype, softcap, biased))


def _close(found: Tensor, reference: Tensor, tolerance: float, case: tuple[Any, ...]) -> None:
    error = float((found.double() - reference.double()).norm() / (reference.double().norm() + 1e-3))
    assert error < tolerance, f"off by {error:.2e} of the norm: {case}"


if __name__ == "__main__":
    main()

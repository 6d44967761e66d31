"""The kernels of `ops.scores`, in Triton; imported where there is a CUDA device.

Both go once over the logits of a block of the vocabulary, `[token, width]`, as they come out of the matmul. A program of `fold` has a
token to itself; a program of `slope` has BLOCK columns of one. CAP is the soft cap, 0 where there is none; LOWEST
stands for −∞; `bias` may be None, and so may a gradient that nothing came down for.
"""

# A kernel's arguments must not be annotated, and what Triton makes of them no type checker knows.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

import triton
import triton.language as tl


@triton.jit
def _scaled(raw, bias, column, inside, inverse, CAP: tl.constexpr, LOWEST: tl.constexpr):
    """What the softmax is over, and how steeply it follows the matmul's result."""
    x = raw.to(tl.float32)
    if bias is not None:
        x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    slope = inverse
    if CAP > 0:
        shrunk = tl.exp(-2.0 * tl.abs(x) / CAP)
        bent = (1.0 - shrunk) / (1.0 + shrunk)  # tanh |x / CAP|
        x = tl.where(x < 0, -CAP, CAP) * bent
        slope = inverse * (1.0 - bent * bent)
    x *= inverse
    return tl.where(x < LOWEST, LOWEST, x), slope


@triton.jit
def fold(logits, stride, bias, targets, inverses, sums, tokens, width, CAP: tl.constexpr, LOWEST: tl.constexpr, BLOCK: tl.constexpr):
    """Takes a block's columns into a token's running maximum, Σ e, Σ e·d and target, where d = x − maximum and e = exp d."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    inverse = tl.load(inverses + token)
    top = tl.load(sums + token)
    total = tl.load(sums + tokens + token)
    weighted = tl.load(sums + 2 * tokens + token)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        x, _ = _scaled(tl.load(row + column, mask=inside, other=0.0), bias, column, inside, inverse, CAP, LOWEST)
        x = tl.where(inside, x, LOWEST)
        higher = tl.maximum(top, tl.max(x, axis=0))
        shrunk = tl.exp(top - higher)
        deviation = x - higher
        share = tl.exp(deviation)
        weighted = shrunk * (weighted + total * (top - higher)) + tl.sum(share * deviation, axis=0)
        total = shrunk * total + tl.sum(share, axis=0)
        top = higher
    tl.store(sums + token, top)
    tl.store(sums + tokens + token, total)
    tl.store(sums + 2 * tokens + token, weighted)
    target = tl.load(targets + token)
    if (target >= 0) & (target < width):
        x, _ = _scaled(tl.load(row + target), bias, target, True, inverse, CAP, LOWEST)
        tl.store(sums + 3 * tokens + token, x)


@triton.jit
def slope(
    logits,
    stride,
    slopes,
    slopes_stride,
    bias,
    targets,
    inverses,
    sums,
    logprob_grads,
    entropy_grads,
    tokens,
    width,
    CAP: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the gradient of the matmul's result. `sums` has, of each token, maximum, log Σ e, and entropy."""
    token = tl.program_id(0).to(tl.int64)
    inverse = tl.load(inverses + token)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x, steepness = _scaled(tl.load(logits + token * stride + column, mask=inside, other=0.0), bias, column, inside, inverse, CAP, LOWEST)
    log_p = x - tl.load(sums + token) - tl.load(sums + tokens + token)
    p = tl.exp(log_p)
    result = tl.zeros([BLOCK], dtype=tl.float32)
    if logprob_grads is not None:
        target = tl.load(targets + token)
        result += tl.load(logprob_grads + token) * (tl.where(column == target, 1.0, 0.0) - p)
    if entropy_grads is not None:
        result -= tl.load(entropy_grads + token) * p * (log_p + tl.load(sums + 2 * tokens + token))
    result *= steepness
    tl.store(slopes + token * slopes_stride + column, result.to(slopes.dtype.element_ty), mask=inside)

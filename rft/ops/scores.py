"""Log-probs and entropies of tokens from hidden states and the model's head, without the logits.

`[token, vocab]` is the largest tensor of a training step: at 32,768 tokens and a vocabulary of 152 thousand, 20 GB in fp32, and the
usual way makes several. Here a block of the vocabulary is taken at a time, for all tokens: a matmul, and one pass that takes the block
into each token's running maximum and sums. The backward pass does the block's matmul again and turns it into its gradient in one pass.
What is ever held is a block, and one fp32 copy of the hidden states' gradient.
"""

import dataclasses as dc
from typing import Any

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rft.errors import BadInput
from rft.shapes import checked

CHUNKS = {"cpu": 1 << 18}
CHUNK = 1 << 28
"""Logits that are held in fp32 at a time: 1 GiB, and where there is a cache to stay in, 1 MiB."""
NARROWEST = {"cpu": 256}
NARROW = 2048
"""Columns that a block has at least, however many tokens there are: with fewer a matmul waits for memory."""
ALIGNED = 128
"""A block's width is a multiple of it, as tensor cores want it."""
LOWEST = -1e30
"""Stands for −∞: far enough down for a probability of 0, and its difference to anything is still a number."""
HALVES = (torch.bfloat16, torch.float16)
SPAN, WARPS = 4096, 8
"""Columns that a kernel's program has in registers at a time, and the warps that share them."""


@checked
def head_scores(
    hidden: Float[Tensor, "token width"],
    weight: Float[Tensor, "vocab width"],
    targets: Int64[Tensor, "token"],
    temperature: Float32[Tensor, "token"],
    *,
    bias: Float[Tensor, "vocab"] | None = None,
    softcap: float | None = None,
) -> tuple[Float32[Tensor, "token"], Float32[Tensor, "token"]]:
    """Each target's log-prob and the entropy of the distribution it is of, from hidden states and head.

        z = hidden weightᵀ + bias,   z ← c tanh(z / c) with softcap c,   x = z / temperature
        logprob_t = x[t, target_t] − log Σ_v exp x[t, v]
        entropy_t = −Σ_v p[t, v] log p[t, v],   p = softmax x

    `hidden` are the states after the last norm that predict the targets: the shift by one token is the caller's. Temperatures are per
    token, as rows of a batch may be sampled at different ones; 0 (greedy sampling) has the scores of 1. Both results are in nats and
    fp32, and differentiable in hidden, weight and bias, once; ∂logprob/∂x = onehot(target) − p and ∂entropy/∂x = −p (log p + entropy).
    Gradients are summed up in fp32 and have their tensor's dtype; one that is not needed is not computed, nor what comes of a result
    that the loss does not use. The logits of bf16 and fp16 are fp32 on a GPU, and rounded to their dtype on a CPU. An infinite negative
    bias (a padded vocabulary) is a probability of 0. No tokens give no scores, and gradients of 0.

    Never held: anything of size token × vocab. A sharded head is given as what its module has during forward, where FSDP2 has gathered
    it; a tied one as it is: its gradients add up.

    Every row is read, so select the tokens that count before. Raises `BadInput` for dtypes that differ, and for a softcap that is not
    positive; for targets outside of the vocabulary and negative temperatures on a CPU (on a GPU finding out would make the host
    wait: such a target's log-prob is NaN there).

    Known as: TRL `GRPOConfig(use_liger_kernel=True)`; verl `actor_rollout_ref.model.use_fused_kernels=True`.
    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, https://arxiv.org/abs/2411.09009; Milakov, Gimelshein,
    Online normalizer calculation for softmax, https://arxiv.org/abs/1805.02867
    """
    _refuse(hidden, weight, targets, temperature, bias, softcap)
    inverse = 1 / temperature.where(temperature != 0, 1.0)
    return _HeadScores.apply(hidden, weight, bias, targets, inverse, softcap or 0.0)


def _refuse(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, bias: Tensor | None, softcap: float | None) -> None:
    if {hidden.dtype} != {each.dtype for each in (weight, bias) if each is not None}:
        raise BadInput("head_scores: hidden, weight and bias must have one dtype; cast hidden as the model's head would")
    if softcap is not None and not softcap > 0:
        raise BadInput(f"head_scores: softcap must be positive, but is {softcap}; leave it None for a head without one")
    if hidden.device.type == "cpu" and len(hidden):
        if int(targets.min()) < 0 or int(targets.max()) >= len(weight):
            raise BadInput(f"head_scores: targets must lie in 0 … {len(weight) - 1}; put 0 where there is none, and mask its score")
        if not float(temperature.min()) >= 0:
            raise BadInput("head_scores: temperatures must be 0 (read as 1) or positive")


@dc.dataclass(frozen=True)
class _Reading:
    """How a block's logits are read: `targets` count from the block's first column, and most lie outside of it."""

    bias: Tensor | None
    targets: Tensor
    inverse: Tensor
    cap: float

    def of(self, block: slice) -> "_Reading":
        bias = None if self.bias is None else self.bias[block]
        return dc.replace(self, bias=bias, targets=self.targets - block.start)


class _HeadScores(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, inverse: Tensor, cap: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        states, reading = hidden.contiguous(), _Reading(bias, targets, inverse, cap)
        sums = hidden.new_zeros(4, len(hidden), dtype=torch.float32)
        sums[0], sums[3] = LOWEST, torch.nan
        for block in _blocks(hidden, weight):
            logits = _product(states, weight[block].T)
            (_fold_fused if logits.is_cuda else _fold)(logits, reading.of(block), sums)
            del logits
        top, total, weighted, picked = sums
        logprob, entropy = picked - top - total.log(), total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, bias, targets, inverse, torch.stack([top, total.log(), entropy]))
        ctx.cap = cap
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the parameters' names
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, inverse, sums = ctx.saved_tensors
        if all(grad is None for grad in grads):
            return (None,) * 6
        states, reading = hidden.contiguous(), _Reading(bias, targets, inverse, ctx.cap)
        needed = ctx.needs_input_grad
        of_hidden = torch.zeros_like(states, dtype=torch.float32) if needed[0] else None
        of_weight = torch.zeros_like(weight) if needed[1] else None
        of_bias = torch.zeros_like(bias) if needed[2] else None
        for block in _blocks(hidden, weight):
            logits = _product(states, weight[block].T)
            slopes = (_slopes_fused if logits.is_cuda else _slopes)(logits, reading.of(block), sums, grads, hidden.dtype)
            del logits
            if of_hidden is not None:
                _add_product(of_hidden, slopes, weight[block])
            if of_weight is not None:
                of_weight[block] = _product(slopes.T, states)
            if of_bias is not None:
                of_bias[block] = slopes.sum(0, dtype=torch.float32)
            del slopes
        return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None


def _blocks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """The vocabulary in blocks of about the same width; none where there are no tokens."""
    tokens, vocab, kind = len(hidden), len(weight), hidden.device.type
    if not tokens:
        return []
    widest = max(NARROWEST.get(kind, NARROW), CHUNKS.get(kind, CHUNK) // tokens)
    width = -(-vocab // -(-vocab // widest))
    width = -(-width // ALIGNED) * ALIGNED
    return [slice(first, min(first + width, vocab)) for first in range(0, vocab, width)]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product in fp32; a CPU has only one that is rounded to the factors' dtype first."""
    if left.is_cuda and left.dtype in HALVES:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).float()


def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the matrix product to sums in fp32."""
    if left.dtype == sums.dtype:
        _ = sums.addmm_(left, right)
    elif left.is_cuda and left.dtype in HALVES:
        _ = torch.addmm(sums, left, right, out_dtype=torch.float32, out=sums)
    else:
        _ = sums.add_(torch.mm(left, right))


# ---- the passes over a block; they may overwrite its logits ----


def _fold(logits: Tensor, reading: _Reading, sums: Tensor) -> None:
    """Takes a block into each token's running maximum, Σ e, Σ e·d and target, where d = x − maximum and e = exp d."""
    x, _ = _scaled(logits, reading)
    top, total, weighted, picked = sums
    inside = (reading.targets >= 0) & (reading.targets < x.shape[1])
    found = x.gather(1, reading.targets.where(inside, 0)[:, None]).squeeze(1)
    _ = picked.copy_(found.where(inside, picked))
    higher = torch.maximum(top, x.amax(dim=1))
    deviation = x.sub_(higher[:, None])
    share = deviation.exp()
    shrunk = (top - higher).exp()
    _ = weighted.add_(total * (top - higher)).mul_(shrunk).add_(torch.linalg.vecdot(share, deviation))
    _ = total.mul_(shrunk).add_(share.sum(dim=1))
    _ = top.copy_(higher)


def _slopes(logits: Tensor, reading: _Reading, sums: Tensor, grads: tuple[Tensor | None, ...], dtype: torch.dtype) -> Tensor:
    """The gradient of the matmul's result. `sums` has, of each token, maximum, log Σ e, and entropy; `grads` are the two results'."""
    x, steepness = _scaled(logits, reading)
    top, log_total, entropy = sums[:, :, None]
    log_p = x.sub_(top).sub_(log_total)
    p = log_p.exp()
    by_logprob, by_entropy = (None if grad is None else grad[:, None] for grad in grads)
    result = torch.zeros_like(p) if by_entropy is None else log_p.add_(entropy).mul_(p).mul_(-by_entropy)
    if by_logprob is not None:
        inside = ((reading.targets >= 0) & (reading.targets < p.shape[1]))[:, None]
        result = result.addcmul_(p, by_logprob, value=-1)
        result = result.scatter_add_(1, reading.targets[:, None].where(inside, 0), by_logprob.where(inside, 0.0))
    return result.mul_(steepness).to(dtype)


def _scaled(logits: Tensor, reading: _Reading) -> tuple[Tensor, Tensor]:
    """What the softmax is over, and how steeply it follows the matmul's result."""
    if reading.bias is not None:
        logits = logits.add_(reading.bias)
    steepness = reading.inverse[:, None]
    if reading.cap:
        bent = logits.div_(reading.cap).tanh_()
        steepness = steepness * (1 - bent.square())
        logits = bent.mul_(reading.cap)
    return logits.mul_(reading.inverse[:, None]).clamp_(min=LOWEST), steepness


# ---- the same by kernel ----


def _fold_fused(logits: Tensor, reading: _Reading, sums: Tensor) -> None:
    from rft.ops.scores_kernel import fold

    tokens, width = logits.shape
    read = (reading.bias, reading.targets, reading.inverse)
    fold[(tokens,)](logits, logits.stride(0), *read, sums, tokens, width, reading.cap, LOWEST, _span(width), num_warps=WARPS)


def _slopes_fused(logits: Tensor, reading: _Reading, sums: Tensor, grads: tuple[Tensor | None, ...], dtype: torch.dtype) -> Tensor:
    from rft.ops.scores_kernel import slope

    tokens, width = logits.shape
    # Rows that begin on 16 bytes, as the matmuls after it want them; in fp32 the gradient takes the logits' place.
    padded = -(-width // ALIGNED) * ALIGNED
    slopes = logits if dtype == torch.float32 else logits.new_empty(tokens, padded, dtype=dtype)[:, :width]
    read, given = (reading.bias, reading.targets, reading.inverse), [None if grad is None else grad.contiguous() for grad in grads]
    places = (logits, logits.stride(0), slopes, slopes.stride(0))
    grid = (tokens, -(-width // _span(width)))
    slope[grid](*places, *read, sums, *given, tokens, width, reading.cap, LOWEST, _span(width), num_warps=WARPS)
    return slopes


def _span(width: int) -> int:
    return min(SPAN, 1 << (width - 1).bit_length())

"""What kernels hold in memory, for those parts of a pass that the meta device would compute in another way than a GPU does.

Each makes the tensors that its original makes and keeps those that its original keeps; no number is computed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rft.ops.scores import ALIGNED, CHUNK, CHUNKS, NARROW, NARROWEST

ATTENTION = "rft_planned"
"""The name of `attention` in transformers' registry."""


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> tuple[Tensor, None]:
    """FlashAttention and its kind: inputs, output and one number for each head and token are kept, and nothing of size token²."""
    del module, attention_mask
    return _Attention.apply(query, key, value).transpose(1, 2), None


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, width, _ = query.shape
        mixed = query.new_empty(rows, width, heads, value.shape[-1]).transpose(1, 2)  # as the projection after it takes it
        ctx.save_for_backward(query, key, value, mixed, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004 (what autograd gives)
        query, key, value, _, sums = ctx.saved_tensors
        gradient = torch.empty_like(query)
        summed = [torch.empty_like(query, dtype=torch.float32), torch.empty_like(sums)]
        # Gradients of keys and values are made for every head of the queries, and then added up.
        apart = [query.new_empty(*query.shape[:-1], part.shape[-1]) for part in (key, value)]
        together = tuple(torch.empty_like(part) for part in (key, value))
        del summed, apart
        return gradient, *together


def scores(hidden: Tensor, weight: Tensor, device: str) -> tuple[Tensor, Tensor]:
    """`rft.ops.scores.head_scores` on a device of that kind: log-probs and entropies, a block of the vocabulary at a time."""
    return _Scores.apply(hidden, weight, device)


class _Scores(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, device: str) -> tuple[Tensor, Tensor]:
        sums = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        logits = _block(hidden, weight, device, torch.float32)
        del logits
        ctx.save_for_backward(hidden, weight, hidden.new_empty(3, len(hidden), dtype=torch.float32))
        ctx.device = device
        return torch.empty_like(sums[0]), torch.empty_like(sums[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:  # noqa: ARG004 (what autograd gives)
        hidden, weight, _ = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden, dtype=torch.float32)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        logits = _block(hidden, weight, ctx.device, torch.float32)
        slopes = logits if hidden.dtype == torch.float32 else torch.empty_like(logits, dtype=hidden.dtype)
        del logits
        product = hidden.new_empty(slopes.shape[1], hidden.shape[1], dtype=torch.float32)
        del slopes, product
        return of_hidden.to(hidden.dtype, copy=True), of_weight, None


def _block(hidden: Tensor, weight: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    return hidden.new_empty(len(hidden), block_width(len(hidden), len(weight), device), dtype=dtype)


def block_width(tokens: int, vocab: int, device: str) -> int:
    """Columns of the widest block of the vocabulary that `head_scores` takes at a time."""
    widest = max(NARROWEST.get(device, NARROW), CHUNKS.get(device, CHUNK) // max(tokens, 1))
    width = -(-vocab // -(-vocab // widest))
    return min(-(-width // ALIGNED) * ALIGNED, vocab)

"""Sums and means over marked entries, which what stands elsewhere (padding, NaN, infinity) cannot touch, nor its gradient."""

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.shapes import checked


@checked
def marked(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Float32[Tensor, "*axes"]:
    """The marked values in fp32, 0 elsewhere."""
    return torch.where(mask, values.float(), 0.0)


@checked
def masked_sum(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"]) -> Float32[Tensor, ""]:
    """Σ values[mask], in fp32; 0 where nothing is marked."""
    return marked(values, mask).sum()


@checked
def masked_mean(values: Float[Tensor, "*axes"], mask: Bool[Tensor, "*axes"], total: int | None = None) -> Float32[Tensor, ""]:
    """Σ values[mask] / total, in fp32; 0 where nothing is marked.

    `total` is the number of marked entries of the whole that `values` are a part of (a global batch of which this is one
    micro-batch); None: those of `mask`.
    """
    count = mask.sum() if total is None else torch.tensor(total)
    return masked_sum(values, mask) / count.clamp(min=1)


@checked
def row_sum(values: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]) -> Float32[Tensor, "batch"]:
    """Σ values[i, mask[i]] of each row i, in fp32; 0 for a row without marks."""
    return marked(values, mask).sum(dim=1)


@checked
def row_mean(values: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]) -> Float32[Tensor, "batch"]:
    """The mean of values[i, mask[i]] of each row i, in fp32; 0 for a row without marks."""
    return row_sum(values, mask) / mask.sum(dim=1).clamp(min=1)

"""Drawing tokens: pure functions of logits and uniform random numbers, so that a row's draw is a matter of that row alone."""

import math

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor
from torch.nn.functional import pad

from rft.sampling import Sampling

BLOCK = 256
"""Tokens of one block of the vocabulary; a draw finds its block first, and then looks into that alone."""


def uniforms(seed: int, count: int) -> Float64[Tensor, "count"]:
    """The random numbers of one response, all of them in [0, 1): they depend on its seed (at least 0) and on nothing else."""
    # Not torch's generator, which on a CPU takes 32 bits of a seed.
    return torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).random(count))


def draw(
    logits: Float[Tensor, "row vocab"], numbers: Float64[Tensor, "row"], sampling: Sampling
) -> tuple[Int64[Tensor, "row"], Float32[Tensor, "row"]]:
    """One token a row, and its log-prob in fp32 under the distribution that `Sampling` describes.

    The token is the inverse of the cumulative distribution at the row's number u: the first one with P(token or before) > u.
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        logprobs = logits.float().log_softmax(-1)
    else:
        logprobs = _cut(logits.float() / sampling.temperature, sampling).log_softmax(-1)
        tokens = invert(logprobs.exp(), numbers)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _cut(logits: Float32[Tensor, "row vocab"], sampling: Sampling) -> Float32[Tensor, "row vocab"]:
    """Sets to −∞ what lies outside of the `top_k` most likely tokens, below `min_p`, and outside of the smallest set of mass `top_p`."""
    vocab = logits.shape[1]
    top_k = min(sampling.top_k or vocab, vocab)
    if sampling.min_p:
        logits = logits.masked_fill(logits < logits.max(-1, keepdim=True).values + math.log(sampling.min_p), -torch.inf)
    if top_k == vocab and sampling.top_p == 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ordered[:, top_k:] = -torch.inf
    if sampling.top_p < 1:
        mass = ordered.softmax(-1)
        before = mass.cumsum(-1) - mass
        _ = ordered[:, 1:].masked_fill_(before[:, 1:] >= sampling.top_p, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def invert(mass: Float32[Tensor, "row vocab"], numbers: Float64[Tensor, "row"]) -> Int64[Tensor, "row"]:
    """The first token whose cumulative mass is above the number, in shares of the whole.

    Two levels, since a cumulative sum over the whole vocabulary costs more than all else here. At each, the number is scaled by the
    sum that was really computed there, so that rounding never leads to a token without mass. Of masses that are NaN it is some token:
    the log-prob tells.
    """
    blocks = pad(mass, (0, -mass.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    block, rest = _search(blocks.sum(-1), numbers)
    inside, _ = _search(blocks[torch.arange(len(block), device=block.device), block], rest)
    return (block * BLOCK + inside).clamp_max(mass.shape[1] - 1)


def _search(mass: Float32[Tensor, "row bin"], numbers: Float64[Tensor, "row"]) -> tuple[Int64[Tensor, "row"], Float64[Tensor, "row"]]:
    """The bin that holds each number, in shares of the row's sum; and where in that bin it lies, in [0, 1)."""
    ends = mass.double().cumsum(-1)
    target = numbers[:, None] * ends[:, -1:]
    found = torch.searchsorted(ends, target, right=True).clamp_max(mass.shape[1] - 1)
    width = mass.gather(1, found).double()
    return found[:, 0], ((target - (ends.gather(1, found) - width)) / width).clamp(0, 1 - 2**-53)[:, 0]

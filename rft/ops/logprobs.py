"""Log-probs of tokens from logits: the one place where anything is shifted by one token.

Logits at column t are about token t + 1. Everywhere else in the library what stands at column t is about token t, so column 0 is 0.
"""

import dataclasses as dc
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rft.shapes import checked

CHUNKS = {"cpu": 1 << 18}
CHUNK = 1 << 26
"""Logits that are held in fp32 at a time: 256 MiB, and where there is a cache to stay in, 1 MiB."""


@checked
def predictors(wanted: Bool[Tensor, "batch seq"]) -> Int64[Tensor, "kept"]:
    """Columns whose logits predict a wanted token in some row, ascending; the others need no head.

    Column 0 is predicted by none, so wanting it adds nothing. At least one column is kept (a graph needs something to hang on), so
    `seq` must be at least 2.
    """
    needed = wanted[:, 1:].any(dim=0)
    needed[0] |= ~needed.any()
    return needed.nonzero().squeeze(1)


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """Which hidden states predict the tokens asked for, and what these are."""

    predictors: Int64[Tensor, "wanted"]
    targets: Int64[Tensor, "wanted"]


@checked
def predictions(tokens: Int64[Tensor, "token"], wanted: Bool[Tensor, "token"]) -> Predictions:
    """Of a run of tokens (a row, or rows one behind the other, padded or not): what is to be asked of the hidden states.

        the hidden state at i predicts token i + 1

    In the order of the run. The first token of a row is predicted by nothing, so it must not be wanted; that of the run cannot be.
    """
    predictors = wanted[1:].nonzero().squeeze(1)
    return Predictions(predictors=predictors, targets=tokens[predictors + 1])


@checked
def token_logprobs(
    logits: Float[Tensor, "batch kept vocab"],
    tokens: Int64[Tensor, "batch seq"],
    temperature: float,
    columns: Int64[Tensor, "kept"] | None = None,
) -> Float32[Tensor, "batch seq"]:
    """log softmax(logits[b, t − 1] / temperature)[tokens[b, t]] at column t, in fp32; 0 at column 0 and where no logits are given.

    `columns` says which columns `logits` are of, as `predictors` gives them; None: all of `seq` (those of the last token are not
    used). Temperature 0 (greedy sampling) has the log-probs of temperature 1. No fp32 copy of the logits is made, nor kept for the
    backward pass; the gradient has their dtype.
    """
    if columns is None:
        columns = torch.arange(tokens.shape[1] - 1, device=tokens.device)
        logits = logits[:, :-1]
    values = _TargetLogProb.apply(logits, tokens[:, columns + 1], temperature or 1.0)
    empty = torch.zeros(tokens.shape, dtype=torch.float32, device=logits.device)
    return empty.index_copy(1, columns + 1, values)


class _TargetLogProb(Function):
    """x_target / T − logsumexp(x / T) for logits `[batch, kept, vocab]`, a chunk of rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        flat, picked = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1, 1)
        normalisers, values = (torch.empty(len(flat), dtype=torch.float32, device=flat.device) for _ in range(2))
        for rows in _chunks(flat):
            scaled = flat[rows].float() / temperature
            normalisers[rows] = scaled.logsumexp(dim=-1)
            values[rows] = scaled.gather(1, picked[rows]).squeeze(1) - normalisers[rows]
        ctx.save_for_backward(logits, targets, normalisers)
        ctx.temperature = temperature
        return values.view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the parameters' names
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        logits, targets, normalisers = ctx.saved_tensors
        flat, picked = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1, 1)
        scales = grads[0].reshape(-1, 1) / ctx.temperature
        result = torch.empty_like(flat)
        for rows in _chunks(flat):
            # d/dx (x_target / T − logsumexp(x / T)) = (onehot − softmax(x / T)) / T
            shares = (flat[rows].float() / ctx.temperature).sub_(normalisers[rows, None]).exp_().mul_(-scales[rows])
            result[rows] = shares.scatter_add_(1, picked[rows], scales[rows])
        return result.view(logits.shape), None, None


def _chunks(flat: Tensor) -> list[slice]:
    rows = max(1, CHUNKS.get(flat.device.type, CHUNK) // max(1, flat.shape[1]))
    return [slice(first, first + rows) for first in range(0, len(flat), rows)]

"""What a loss is to a trainer: an `Objective` maps the Actor's scores of one micro-batch to its share of the step's loss.

A trainer knows no formula and an objective no rank: the trainer cuts the global batch into micro-batches and adds up what the
objective gives, over micro-batches and ranks; the objective divides by the whole batch's `Totals`. So a batch has one loss and one
gradient, however it is split. A micro-batch may have nothing sampled at all (a filler that keeps ranks company): its loss is 0, and not
the mean of nothing.
"""

import dataclasses as dc
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from rft import tree
from rft.errors import BadInput
from rft.experience import Minibatch
from rft.ops.aggregation import Totals
from rft.ops.metrics import Metric
from rft.shapes import check_record
from rft.state import BatchId

RESERVED = ("loss", "grad_norm", "lr")
"""Metrics that every step reports by itself."""


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """What the Actor says of each token now, with gradient; 0 where nothing is sampled."""

    logprobs: Float32[Tensor, "batch seq"]
    """log p(token t | before t), in nats, at the row's temperature."""
    entropy: Float32[Tensor, "batch seq"]
    """Of the distribution that token t is drawn from, in nats, at the row's temperature."""

    def __post_init__(self) -> None:
        check_record(self)


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """What one forward pass takes: rows of a mini-batch, cut to their longest, with the old log-probs joined.

    `old` is None where the objective is to take its own detached log-probs (the first step). A filler row, which keeps the ranks'
    counts equal, has nothing sampled and contributes nothing.
    """

    rows: Minibatch
    old: Float32[Tensor, "batch seq"] | None

    @property
    def responses(self) -> Bool[Tensor, "batch seq"]:
        """The sampled tokens of rows that are no demonstrations: what a policy loss is about."""
        return self.rows.sampled & ~self.rows.demonstrated[:, None]


@dc.dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What an objective gives for one micro-batch.

    `loss` is a scalar, already divided by the step's `Totals`, so that the sum over micro-batches and ranks is the loss of the
    global batch. A metric is a scalar, scaled likewise, or a `Metric` that knows how it adds up.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor | Metric]


Objective = Callable[[TokenScores, MicroBatch, Totals], LossTerms]
"""(the Actor's scores of the micro-batch's tokens, with gradient; the micro-batch; the totals) -> loss and metrics."""

OBJECTIVE, VALUE_OBJECTIVE = ("scores", "micro-batch", "totals"), ("values", "micro-batch", "totals")
"""What each takes, in words."""

ValueObjective = Callable[[Float32[Tensor, "batch seq"], MicroBatch, Totals], LossTerms]
"""The same for the Critic: (its values, with gradient, 0 where nothing is sampled; the micro-batch; the totals) -> loss and metrics."""


def check_terms(terms: Any) -> LossTerms:
    """What an objective gave, if a trainer can use it. Raises `BadInput` that says what is wrong with it."""
    if not isinstance(terms, LossTerms):
        raise BadInput(f"an objective returns LossTerms(loss=…, metrics=…), and gave {type(terms).__name__}")
    loss: Any = terms.loss
    if not isinstance(loss, Tensor) or loss.dim():
        raise BadInput(f"an objective's loss is a scalar tensor, divided by the totals; it gave {_kind(loss)}")
    for name, value in terms.metrics.items():
        if (isinstance(value, Tensor) and value.dim()) or not (isinstance(value, Tensor) or hasattr(value, "merge")):
            raise BadInput(f"the metric {name!r} is a scalar tensor or a Metric; the objective gave {_kind(value)}")
        if name in RESERVED:
            raise BadInput(f"a metric cannot be called {name!r}, every step reports its own; give it another name")
    return terms


def tried(objective: Objective) -> Objective:
    """The objective, if it can be applied to made-up rows: one sampled and one demonstrated, and then a filler with neither.

    So a wrong parameter, and a mean over nothing, are found when an objective is composed. Raises `BadInput`, and what it raises.
    """
    _try(objective, TokenScores(logprobs=torch.zeros(2, 3), entropy=torch.zeros(2, 3)))
    return objective


def tried_on_values(objective: ValueObjective) -> ValueObjective:
    """The same for an objective of the Critic."""
    _try(objective, torch.zeros(2, 3))
    return objective


def _try(objective: Callable[[Any, MicroBatch, Totals], LossTerms], shown: object) -> None:
    for sampled in (True, False):
        terms = check_terms(objective(shown, _made_up(sampled), Totals(tokens=2, sequences=1, demonstrated=2)))
        if not math.isfinite(float(terms.loss)):
            what = "two made-up rows" if sampled else "a micro-batch with nothing sampled (which keeps ranks company), where it must be 0"
            raise BadInput(f"the objective's loss is {float(terms.loss)} on {what}; divide by the totals, not by what is marked here")


def _made_up(sampled: bool) -> MicroBatch:
    flat, wide, each = torch.zeros(2), torch.zeros(2, 3), torch.arange(2)
    rows = Minibatch(
        batches=(BatchId("made up"),),
        origin=torch.zeros_like(each),
        rows=each,
        tokens=torch.zeros(2, 3, dtype=torch.int64),
        mask=torch.ones(2, 3, dtype=torch.bool),
        sampled=torch.tensor([[False, sampled, sampled]] * 2),
        logprobs=wide,
        groups=each,
        rewards=flat,
        advantages=wide,
        temperature=flat,
        demonstrated=each == 1,
        reference=wide,
        values=wide,
        returns=wide,
    )
    return MicroBatch(rows=rows, old=wide)


def _kind(value: object) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

"""Which hidden states predict which tokens: the one place where anything is shifted by one token.

The hidden state of token t predicts token t + 1. Everywhere else in the library what stands at column t is about token t, so that
column 0 is about nothing.
"""

import dataclasses as dc

from jaxtyping import Bool, Int64
from torch import Tensor

from rft.shapes import check_record, checked


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """What to ask of the hidden states of a run of tokens; `wanted` counts the tokens asked for, in the run's order."""

    predictors: Int64[Tensor, "wanted"]
    """Places in the run."""
    targets: Int64[Tensor, "wanted"]
    """The tokens whose log-probs are asked for."""

    def __post_init__(self) -> None:
        check_record(self)


@checked
def predictions(tokens: Int64[Tensor, "token"], wanted: Bool[Tensor, "token"]) -> Predictions:
    """Which hidden states predict the wanted tokens of a run: a row, or rows one behind the other, padded or not.

        predictors = {t : wanted_{t+1}},   targets = tokens_{predictors + 1}

    The first token of a row is predicted by nothing and must not be wanted; where one begins is not to be seen here.
    """
    predictors = wanted[1:].nonzero().squeeze(1)
    return Predictions(predictors=predictors, targets=tokens[predictors + 1])

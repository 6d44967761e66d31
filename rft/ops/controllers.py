"""The coefficient of the KL penalty, fixed or steered towards a target.

A controller is a pair of pure functions, as an optimizer is in optax: `init` gives its state, `update` takes a state and what was
measured, and gives the next one. The state is a record of tensors that is saved with the run. All ranks must measure the same: give
`update` the KL of the whole batch.
"""

import dataclasses as dc
import math
import sys
from collections.abc import Callable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rft import tree
from rft.errors import BadInput
from rft.ops.parameters import require_positive, require_within
from rft.shapes import check_record, checked


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Coefficient:
    """The β of a KL penalty: one float64 scalar."""

    value: Float64[Tensor, ""]

    def __post_init__(self) -> None:
        check_record(self)


@dc.dataclass(frozen=True, kw_only=True)
class Controller:
    """`init()` gives the first coefficient, `update(coefficient, kl, count)` the next."""

    init: Callable[[], Coefficient]
    update: Callable[[Coefficient, Tensor, int], Coefficient]


def fixed(value: float) -> Controller:
    """A coefficient that stays as it is.

        β' = β

    Raises `BadInput` for a negative `value`; `update` raises it for a KL that is not finite and for a `count` below 1.

    Known as: verl `FixedKLController`; OpenRLHF `FixedKLController`; LightRFT `FixedKLController`.
    """
    first = _first("fixed", value)

    @checked
    def update(state: Coefficient, kl: Float[Tensor, ""], count: int) -> Coefficient:
        _ = _measured(kl, count)
        return state

    return Controller(init=lambda: first, update=update)


def adaptive(value: float, *, target: float, horizon: int) -> Controller:
    """A coefficient that rises while the KL is above its target, and falls while it is below.

        β' = β (1 + e · count / horizon),   e = clip((KL − target) / target, −0.2, 0.2)

    `kl` is the mean KL per response, summed over its tokens, in nats, in the unit of `target`; `count` is the number of responses it
    is the mean of. The paper's K_β = 0.1 is count / horizon. Raises `BadInput` for a negative `value`, a `target` or `horizon` not
    above 0; `update` raises it for a KL that is not finite, a `count` below 1, and for one of 5 `horizon` or more, where β might turn
    negative.

    Known as: verl `AdaptiveKLController`; OpenRLHF `AdaptiveKLController`; LightRFT `AdaptiveKLController`.
    Source: Ziegler et al., Fine-Tuning Language Models from Human Preferences, https://arxiv.org/abs/1909.08593, section 2.2
    """
    first = _first("adaptive", value)
    require_positive("adaptive", target=target, horizon=horizon)

    @checked
    def update(state: Coefficient, kl: Float[Tensor, ""], count: int) -> Coefficient:
        if count >= 5 * horizon:
            raise BadInput(f"adaptive: {count} responses in one update are too many for a horizon of {horizon}: make it longer")
        error = min(max(_measured(kl, count) / target - 1, -0.2), 0.2)
        return Coefficient(value=state.value * (1 + error * count / horizon))

    return Controller(init=lambda: first, update=update)


def _first(where: str, value: float) -> Coefficient:
    require_within(where, 0, sys.float_info.max, value=value)
    return Coefficient(value=torch.tensor(value, dtype=torch.float64))


def _measured(kl: Tensor, count: int) -> float:
    measured = kl.item()
    if not math.isfinite(measured) or count < 1:
        raise BadInput(f"a controller is updated by a finite KL of at least one response, got {measured} of {count}")
    return measured

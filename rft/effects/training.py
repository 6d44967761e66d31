"""Optimizer steps of the Actor."""

from typing import Any

from jaxtyping import Float32
from torch import Tensor

from rft.effects.runtime import runtime_of
from rft.errors import BadInput, NonFiniteGradient, RoleError, ShapeError
from rft.experience import Minibatch
from rft.objectives import Objective
from rft.state import ACTOR_OPTIMIZER, RuntimeState


def step(
    call: str,
    state: RuntimeState[Any, Any, Any, Any],
    minibatch: Minibatch,
    old: Float32[Tensor, "batch seq"] | None,
    objective: Objective,
) -> dict[str, float]:
    """One optimizer step.

    What a trainer refuses on all ranks before it touches the optimizer, a gradient that is not finite too, leaves the state living.
    """
    runtime = runtime_of(state)
    if not callable(objective):
        raise BadInput(f"{call}: objective must be a function of (logprobs, micro-batch, totals), got {type(objective).__name__}")
    if state.roles.of(ACTOR_OPTIMIZER).where != "device":
        raise RoleError(f"{call}: the Actor's optimizer is on the host; write instead: state = reload(state, ACTOR_OPTIMIZER)")
    with runtime.ledger.irreversible("runtime", but=(BadInput, NonFiniteGradient, RoleError, ShapeError)):
        return runtime.trainer.step(minibatch, old, objective)


def check_minibatch(call: str, minibatch: object) -> None:
    """Raises `BadInput` for anything but a `Minibatch`."""
    if not isinstance(minibatch, Minibatch):
        raise BadInput(f"{call} needs a Minibatch, got {type(minibatch).__name__}; take one from an Experience with `minibatches`")

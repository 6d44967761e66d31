"""Two steps of one's own, and the test that holds them to the contract that the library's steps keep.

    python -m pytest examples/own_step.py

A transition takes a `RuntimeState` and returns the next, made by one `then`; an observation returns its value and leaves the state
living. The decorators read the annotations that pyright reads: they refuse a state of other axes, one that does not live and ranks that
are not all here, and put a row into the table, so that `rft.legal(state)` and the messages of other errors know the step.

What really changes lies behind `runtime_of(state)`. Whatever can be refused is refused first. From the first write on, an effect runs
inside `ledger.irreversible`, so that a failure half-way poisons the runtime instead of leaving a state that is not true.
"""

from typing import Any

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from jaxtyping import Float32
from torch import Tensor

import rft
from rft import ACTOR_OPTIMIZER, Awake, O, Offloaded, OnDevice, Rollouts, RuntimeState, W
from rft.effects.runtime import runtime_of
from rft.testing import LIBRARY, Arguments, Call, Refusals, Stash, walk


@rft.transition
def make_room(state: RuntimeState[Awake, W, OnDevice, O], /) -> RuntimeState[Awake, W, Offloaded, O]:
    """Moves the Actor and its optimizer to the host at once, for a long generation. Raises `RoleError` where the optimizer is there."""
    if state.roles.of(ACTOR_OPTIMIZER).where == "host":
        raise rft.RoleError("make_room(state): the optimizer is on the host already; write instead: state = offload_actor(state)")
    runtime = runtime_of(state)
    with runtime.ledger.irreversible("runtime"):
        runtime.trainer.offload("model")
        runtime.trainer.offload("optimizer")
    return rft.then(state, state.engine, state.weights, Offloaded(), state.old, roles=state.roles.moved(ACTOR_OPTIMIZER, "host"))


@rft.observation
def actor_logprobs(state: RuntimeState[Any, Any, OnDevice, Any], rollouts: Rollouts, /) -> Float32[Tensor, "batch seq"]:
    """Scores rollouts by the Actor as it is now, beside the batch in hand: to see how far an update has moved it."""
    trainer, temperature = runtime_of(state).trainer, rollouts.sampling.temperature or 1.0
    return trainer.logprobs(rollouts.tokens, rollouts.mask, rollouts.sampled, temperature, rollouts.images)


# ---- the test ----


def optimizer_is_away(state: RuntimeState[Any, Any, Any, Any], arguments: Arguments) -> Refusals:
    """What `make_room` must refuse although the axes allow it."""
    del arguments
    return {rft.RoleError} if state.roles.of(ACTOR_OPTIMIZER).where == "host" else set()


def some_rollouts(stash: Stash, pick: int) -> Arguments:
    """What `actor_logprobs` is called with."""
    return (stash.rollouts(pick),), {}


OWN = (Call(make_room, refusals=optimizer_is_away), Call(actor_logprobs, some_rollouts))


def test_my_steps_keep_the_contract() -> None:
    """Any order of all steps, with failures at any point: nothing that a state says is ever untrue."""
    run_state_machine_as_test(walk(*LIBRARY, *OWN), settings=settings(max_examples=30, stateful_step_count=40, deadline=None))

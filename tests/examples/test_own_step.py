"""The example of a step of one's own: its walk passes, gets to the new steps, and finds a bug in them."""

import runpy
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

import rft
from rft.effects.runtime import runtime_of
from rft.ledger import TABLE
from rft.testing import LIBRARY, Call, scripted_launch, walk
from tests.launching import ROOT

# As in tests/testing/test_walk.py: many walks of few runs get further than one of many.
WALKS = 6
WALK = settings(
    max_examples=20,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=False,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def own() -> Iterator[Any]:
    """What the example defines; its rows are gone from the table afterwards."""
    before = dict(TABLE)
    yield SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "own_step.py"), run_name="own_step"))
    TABLE.clear()
    TABLE.update(before)


def test_the_walk_passes_and_takes_both_steps(own: Any) -> None:
    tally = Counter[tuple[str, str]]()
    for number in range(WALKS):
        run_state_machine_as_test(seed(number)(walk(*LIBRARY, *own.OWN, tally=tally)), settings=WALK)
    assert tally["make_room", "taken"] >= 3, dict(tally)
    assert tally["make_room", "RoleError"] >= 1
    assert tally["actor_logprobs", "taken"] >= 3


def test_the_table_knows_them(own: Any) -> None:
    with scripted_launch() as begun:
        state = rft.refresh(begun)
        assert {"make_room", "actor_logprobs"} <= set(rft.legal(state))
        state = own.make_room(state)
        assert "make_room" not in rft.legal(state)
        with pytest.raises(rft.IllegalStep, match=r"state = reload_actor\(state\)\n    value = actor_logprobs\(state, rollouts\)"):
            _ = own.actor_logprobs(state, None)


def test_a_step_that_forgets_half_of_its_effect_is_found(own: Any) -> None:
    @rft.transition
    def make_room(
        state: rft.RuntimeState[rft.Awake, rft.W, rft.OnDevice, rft.O], /
    ) -> rft.RuntimeState[rft.Awake, rft.W, rft.Offloaded, rft.O]:
        runtime_of(state).trainer.offload("model")
        roles = state.roles.moved(rft.ACTOR_OPTIMIZER, "host")
        return rft.then(state, state.engine, state.weights, rft.Offloaded(), state.old, roles=roles)

    def walks() -> None:
        for number in range(3 * WALKS):
            run_state_machine_as_test(seed(number)(walk(*LIBRARY, Call(make_room, refusals=own.optimizer_is_away))), settings=WALK)

    with pytest.raises(AssertionError):
        walks()

import copy
import dataclasses as dc
import pickle
import typing
from typing import Any

import pytest
import torch

import rft
from rft import tree
from rft.errors import BrokenInvariant, ConsumedState, RoleError
from rft.state import BatchLogProbs, Devices, Placement, Roles, first_state, spelled
from rft.testing import scripted_launch
from tests.refusals import State, refused, with_old

VERSION, OLDER = rft.PolicyVersion(3), rft.PolicyVersion(2)
BATCH = rft.BatchId("batch")


def state_of(**fields: object) -> State:
    """A state built by hand: asleep, stale, version 3, unless told otherwise."""
    usual = {
        "engine": rft.Asleep(),
        "weights": rft.Stale(None),
        "actor": rft.OnDevice(),
        "old": rft.NoOld(),
        "roles": Roles(),
        "version": VERSION,
        "generation": 7,
        "devices": Devices(),
    }
    return rft.RuntimeState(**{**usual, **fields})


def old_of(source: str = "actor", *, version: rft.PolicyVersion = VERSION, steps: int = 0, values: bool = True) -> rft.OldLogProbs:
    batches = (BatchLogProbs(batch=BATCH, values=torch.zeros(2, 3) if values else None),)
    return rft.OldLogProbs(version=version, batches=batches, source=source, steps=steps)


# ---- invariants ----


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"weights": rft.Fresh(OLDER)}, "Fresh(2) in a state of version 3"),
        ({"weights": rft.Stale(VERSION)}, "Stale(3) in a state of version 3"),
        ({"engine": rft.Awake()}, "awake holds weights"),
        ({"old": old_of(version=rft.PolicyVersion(4))}, "old log-probs of version 4 in a state of version 3"),
    ],
)
def test_fields_that_contradict_each_other_make_no_state(fields: dict[str, object], says: str) -> None:
    with pytest.raises(BrokenInvariant, match=says.replace("(", r"\(").replace(")", r"\)")):
        _ = state_of(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"weights": rft.Fresh(VERSION)},
        {"weights": rft.Stale(OLDER), "engine": rft.Awake()},
        {"old": old_of(version=OLDER)},
        {"old": old_of("engine", steps=5)},
        {"old": old_of("first_step", steps=1, values=False)},
    ],
)
def test_fields_that_agree_make_one(fields: dict[str, object]) -> None:
    state = state_of(**fields)
    assert all(getattr(state, name) is value for name, value in fields.items())


def test_old_logprobs_of_the_first_step_stand_for_one_step_and_have_no_values() -> None:
    with pytest.raises(BrokenInvariant, match="exactly one step"):
        _ = old_of("first_step", steps=2, values=False)
    with pytest.raises(BrokenInvariant, match="'first_step'"):
        _ = old_of("first_step")
    with pytest.raises(BrokenInvariant, match="'actor'"):
        _ = old_of("actor", values=False)


def test_a_state_is_frozen_and_shows_its_axes() -> None:
    state = first_state(Devices(), Roles())
    with pytest.raises(dc.FrozenInstanceError):
        state.weights = rft.Fresh(VERSION)
    assert rft.describe(state) == "RuntimeState[Asleep, Stale, OnDevice, NoOld] (version 0, generation 0)"
    assert "devices" not in repr(state)


def test_then_names_the_axes_keeps_the_rest_and_counts() -> None:
    state = state_of(old=old_of())
    roles = Roles((Placement(rft.ACTOR_OPTIMIZER, "host", 8),))
    follower = rft.then(state, rft.Awake(), rft.Fresh(rft.PolicyVersion(4)), rft.Offloaded(), state.old, version=rft.PolicyVersion(4))
    assert (follower.version, follower.generation, follower.roles) == (4, 8, state.roles)
    assert follower.old is state.old
    assert follower.devices is state.devices
    assert rft.then(state, state.engine, state.weights, state.actor, state.old, roles=roles).roles is roles


@pytest.mark.parametrize(
    ("engine", "weights", "ready"),
    [
        (rft.Awake(), rft.Fresh(VERSION), True),
        (rft.Awake(), rft.Stale(OLDER), False),
        (rft.Asleep(), rft.Fresh(VERSION), False),
    ],
)
def test_is_ready_where_generate_may_be_called(engine: object, weights: object, ready: bool) -> None:
    assert rft.is_ready(state_of(engine=engine, weights=weights)) is ready


def test_what_is_no_state_and_no_name_of_a_role() -> None:
    wrong: typing.Any = 3
    with pytest.raises(rft.BadInput, match=r"is_at\(state, …\): state must be RuntimeState.*, got 3"):
        _ = rft.is_at(wrong, rft.Asleep, rft.Stale, rft.OnDevice, rft.NoOld)
    with pytest.raises(rft.BadInput, match=r"reward_model\(name\): name must be str, got 3"):
        _ = rft.reward_model(wrong)


def test_is_at_where_all_four_axes_are_as_named() -> None:
    there = state_of(engine=rft.Asleep(), weights=rft.Fresh(VERSION), actor=rft.Offloaded(), old=rft.NoOld())
    axes = (rft.Asleep, rft.Fresh, rft.Offloaded, rft.NoOld)
    assert rft.is_at(there, *axes)
    for place, other in enumerate((rft.Awake, rft.Stale, rft.OnDevice, rft.OldLogProbs)):
        assert not rft.is_at(there, *typing.cast(Any, [*axes[:place], other, *axes[place + 1 :]]))


# ---- roles ----


def test_a_role_is_spelled_as_it_is_written_in_a_program() -> None:
    written = ("ACTOR_OPTIMIZER", "REFERENCE", "EMA", "CRITIC", "CRITIC_OPTIMIZER", "reward_model('one')")
    for name in written:
        assert spelled(eval(name, vars(rft))) == name
    assert spelled(rft.Role("mine")) == "'mine'"


def test_roles_move_one_at_a_time_and_unknown_ones_are_refused_by_name() -> None:
    critic = rft.Role("critic")
    roles = Roles((Placement(critic, "device", 8), Placement(rft.ACTOR_OPTIMIZER, "host", 16)))
    moved = roles.moved(critic, "host")
    assert moved.of(critic) == Placement(critic, "host", 8)
    assert moved.of(rft.ACTOR_OPTIMIZER) == roles.of(rft.ACTOR_OPTIMIZER)
    assert roles.of(critic).where == "device"
    with pytest.raises(RoleError, match="no role EMA in this runtime; it has CRITIC, ACTOR_OPTIMIZER"):
        _ = roles.of(rft.Role("ema"))
    with pytest.raises(RoleError, match="it has none"):
        _ = Roles().moved(critic, "host")


# ---- devices, copies and pickles ----


def test_devices_copy_as_themselves_and_refuse_pickling() -> None:
    devices = Devices()
    assert copy.copy(devices) is devices
    assert copy.deepcopy([devices])[0] is devices
    with pytest.raises(ConsumedState, match="cannot be pickled"):
        _ = pickle.dumps(devices)


def by_hand(state: State) -> State:
    return rft.RuntimeState(**{field.name: getattr(state, field.name) for field in dc.fields(state)})


def flattened_and_rebuilt(state: State) -> State:
    return tree.tree_map(lambda leaf: leaf, state)


@pytest.mark.parametrize("disguise", [copy.copy, copy.deepcopy, dc.replace, flattened_and_rebuilt, by_hand])
def test_whatever_equals_the_living_state_is_not_it(disguise: object) -> None:
    with scripted_launch() as begun:
        state, _ = with_old(begun)
        other = disguise(state)
        assert rft.describe(other) == rft.describe(state)
        assert rft.legal(other) == ()
        with refused(state, ConsumedState, "sleep(state)", "a copy", "state = step(state)"):
            _ = rft.sleep(other)


def test_a_state_refuses_to_be_pickled_and_lives_on() -> None:
    with scripted_launch() as state, refused(state, ConsumedState, "cannot be pickled", "save the run"):
        _ = pickle.dumps(state)


def test_a_state_built_around_other_devices_is_no_way_in() -> None:
    with scripted_launch() as state, scripted_launch() as other:
        with refused(state, ConsumedState):
            _ = rft.broadcast(dc.replace(other, devices=state.devices))
        assert rft.legal(other)

import copy
import dataclasses as dc
import gc
import typing
import weakref
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import rft
from rft.errors import (
    BrokenInvariant,
    ConsumedState,
    EngineFailed,
    EnginePoisoned,
    IllegalStep,
    RuntimeClosed,
    RuntimePoisoned,
)
from rft.ledger import TABLE, Ledger, beginning, joint_of, recovery, restoration
from rft.ledger.table import needs, route, written
from rft.state import Devices, Roles, first_state, restored_state, then
from rft.steps import restore
from rft.testing import InjectedFault, scripted_devices, scripted_launch, scripted_minibatch
from tests.refusals import State, failing, refused, sampled, trained, with_old

A, E, O, W = rft.A, rft.E, rft.O, rft.W
Run = typing.TypeVar("Run")


@pytest.fixture(autouse=True)
def _table_is_left_as_it_was() -> Iterator[None]:
    """Steps that are defined in a test are gone after it."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


@pytest.fixture
def begun() -> Iterator[State]:
    with scripted_launch() as state:
        yield state


class Recording(Devices):
    """Devices that tell what was called around a step."""

    def __init__(self, **cannot: str) -> None:
        self.ledger, self.cannot, self.calls = Ledger(), cannot, list[str]()

    def enter(self, step: str, chosen: str, generation: int) -> None:
        self.calls.append(f"enter {step}{chosen} {generation}")

    def leave(self, step: str) -> None:
        self.calls.append(f"leave {step}")


def living(devices: Devices) -> State:
    state = first_state(devices, Roles())
    devices.ledger.advance(state)
    return state


# ---- decorators ----


def test_a_transition_uses_its_state_up_and_the_next_one_lives() -> None:
    @rft.transition
    def stay(state: rft.RuntimeState[E, W, A, O], /) -> rft.RuntimeState[E, W, A, O]:
        return then(state, state.engine, state.weights, state.actor, state.old)

    devices = Recording()
    first = living(devices)
    second = stay(first)
    assert devices.ledger.living() is second
    assert devices.calls == ["enter stay 0", "leave stay"]
    with pytest.raises(ConsumedState, match=r"generation 0.*the living one is.*generation 1"):
        _ = stay(first)
    assert rft.legal(first) == ("restore",)


def test_an_observation_leaves_its_state_living_and_gives_its_value() -> None:
    @rft.observation
    def look(state: rft.RuntimeState[Any, Any, Any, Any], further: int, /, *, sideways: int) -> int:
        return state.generation + further + sideways

    devices = Recording()
    state = living(devices)
    assert look(state, 1, sideways=2) == 3
    assert look(state, 2, sideways=2) == 4
    assert devices.calls == ["enter look 0", "leave look"] * 2


def test_calls_are_told_apart_by_their_roles_and_words() -> None:
    @rft.observation
    def ask(
        state: State, whom: rft.Role, /, how: typing.Literal["loud", "low"] = "low", *, also: rft.Role | None = None, times: int = 1
    ) -> list[object]:
        return [state, whom, how, also, times]

    devices = Recording()
    state = living(devices)
    _ = ask(state, rft.REFERENCE)
    _ = ask(state, rft.reward_model("kind"), "loud", times=3)
    _ = ask(state, rft.Role("friend"), how="loud", also=rft.EMA)
    with pytest.raises(TypeError, match="whom"):
        _ = typing.cast(Any, ask)(state)
    assert devices.calls[::2] == [
        "enter ask of whom REFERENCE of how 'low' 0",
        "enter ask of whom reward_model('kind') of how 'loud' 0",
        "enter ask of whom 'friend' of how 'loud' of also EMA 0",
        "enter ask of how 'low' 0",
    ]


def test_a_step_that_raises_is_left_behind_and_changes_nothing() -> None:
    @rft.transition
    def stumble(state: rft.RuntimeState[E, W, A, O], /) -> rft.RuntimeState[E, W, A, O]:
        raise ZeroDivisionError(state)

    @rft.observation
    def squint(state: rft.RuntimeState[Any, Any, Any, Any], /) -> int:
        raise ZeroDivisionError(state)

    devices = Recording()
    state = living(devices)
    for step in (stumble, squint):
        with pytest.raises(ZeroDivisionError):
            _ = step(state)
        assert devices.calls[-1] == f"leave {step.__name__}"
        assert rft.legal(state)


def test_the_beginning_empties_the_ledger_however_it_is_left() -> None:
    devices = Recording()

    @beginning
    def begin() -> Generator[rft.RuntimeState[rft.Asleep, rft.Stale, rft.OnDevice, rft.NoOld]]:
        yield first_state(devices, Roles())

    with pytest.raises(ZeroDivisionError), begin() as state:
        _ = 1 / int(devices.ledger.living() is not state)
    assert devices.ledger.living() is None
    assert rft.legal(state) == ()
    with pytest.raises(RuntimeClosed, match=r"broadcast\(state\): `launch` was left"):
        _ = rft.broadcast(state)


@pytest.mark.parametrize("given", [None, "state", Devices()])
@pytest.mark.parametrize("step", [rft.sleep, rft.recover, rft.average])
def test_what_is_no_state_is_named(step: Any, given: object) -> None:
    with pytest.raises(IllegalStep, match=rf"{step.__name__}\(state\) needs a RuntimeState, got {type(given).__name__}"):
        _ = step(given)


# ---- what a step of one's own must return ----


def test_a_step_must_return_what_it_promises() -> None:
    @rft.transition
    def nothing(state: rft.RuntimeState[E, W, A, O], /) -> rft.RuntimeState[E, W, A, O]:
        return typing.cast(Any, print(state.generation))

    @rft.transition
    def the_same(state: rft.RuntimeState[E, W, A, O], /) -> rft.RuntimeState[E, W, A, O]:
        return state

    @rft.transition
    def liar(state: rft.RuntimeState[E, W, A, O], /) -> rft.RuntimeState[E, W, rft.Offloaded, O]:
        return typing.cast(Any, then(state, state.engine, state.weights, state.actor, state.old))

    @rft.transition
    def smuggler(state: rft.RuntimeState[E, W, A, O], /) -> rft.RuntimeState[E, W, A, O]:
        return typing.cast(Any, then(first_state(Recording(), Roles()), state.engine, state.weights, state.actor, state.old))

    state = living(Recording())
    for step, says in ((nothing, "NoneType"), (the_same, "by one `then`"), (smuggler, "by one `then`"), (liar, "against its annotation")):
        with pytest.raises(BrokenInvariant, match=f"{step.__name__} returned .*{says}"):
            _ = step(state)
    assert state.devices.ledger.living() is state


def test_annotations_that_make_no_row_are_refused_when_the_step_is_defined() -> None:
    with pytest.raises(TypeError, match="takes a RuntimeState first"):

        @rft.observation
        def on_a_number(state: int, /) -> int:
            return state

    with pytest.raises(TypeError, match="returns one first"):

        @rft.transition
        def to_a_number(state: rft.RuntimeState[E, W, A, O], /) -> int:
            return state.generation

    with pytest.raises(TypeError, match="what it becomes"):

        @rft.transition
        def to_anything(state: rft.RuntimeState[E, W, A, O], /) -> rft.RuntimeState[E, W, A, Any]:
            return then(state, state.engine, state.weights, state.actor, state.old)

    with pytest.raises(TypeError, match="what it becomes"):

        @rft.transition
        def to_another(state: rft.RuntimeState[Any, W, A, O], /) -> rft.RuntimeState[E, W, A, O]:
            return then(state, state.engine, state.weights, state.actor, state.old)


# ---- one step at a time ----


def test_no_step_is_admitted_inside_another(begun: State) -> None:
    state, rollouts = with_old(begun)

    def objective(*_: object) -> Any:
        return rft.sleep(state)

    with pytest.raises(RuntimePoisoned) as caught:
        _ = rft.train_step(state, scripted_minibatch(rollouts), objective)
    cause = caught.value.__cause__
    assert isinstance(cause, IllegalStep)
    assert "sleep(state) was called inside train_step" in str(cause)


def test_nor_inside_an_observation(begun: State) -> None:
    state = rft.refresh(begun)
    rollouts = sampled(state)
    with refused(state, IllegalStep, "sleep(state) was called inside average"):
        _ = rft.average(state, {"x": (float(bool(rft.sleep(state))) for _ in range(1))})
    scored = rft.rewards(state, rollouts, lambda _: float(bool(rft.sleep(state))))
    assert {failure.kind for failure in scored.failures} == {"raised"}
    assert "sleep(state) was called inside rewards" in scored.failures[0].message


# ---- failures ----


@pytest.mark.parametrize("verb", ["sleep", "load", "wake_weights", "flush", "checksums"])
def test_an_engine_that_fails_half_way_is_poisoned_and_recover_leads_on(begun: State, verb: str) -> None:
    state = rft.refresh(begun)
    step = rft.sleep if verb == "sleep" else rft.broadcast
    with failing(state, verb), pytest.raises(EngineFailed, match="state = recover"):
        _ = step(state)
    assert rft.legal(state) == ("recover", "restore")
    assert state.devices.ledger.fault() == "engine"
    with pytest.raises(EnginePoisoned, match=r"offload_actor\(state\): the engine failed earlier .*InjectedFault"):
        _ = rft.offload_actor(state)
    rested = rft.recover(state)
    assert joint_of(rested) == (rft.Asleep, rft.Stale, rft.OnDevice, rft.NoOld)
    assert state.devices.ledger.fault() is None
    assert len(sampled(rft.refresh(rested))) == 4


def test_recover_may_fail_and_be_tried_again(begun: State) -> None:
    state = rft.refresh(begun)
    with failing(state, "generate"), pytest.raises(EngineFailed):
        _ = sampled(state)
    with failing(state, "sleep"), pytest.raises(EngineFailed):
        _ = rft.recover(state)
    assert rft.legal(state) == ("recover", "restore")
    _ = rft.recover(state)


def test_recover_leads_on_where_a_composition_dropped_the_living_state(begun: State) -> None:
    with failing(begun, "wake_cache"), pytest.raises(EngineFailed):
        _ = rft.refresh(begun)
    gc.collect()
    assert rft.legal(begun) == ("restore",)
    rested = rft.recover(begun)
    assert rested.generation == 2
    assert rft.legal(rested)
    with pytest.raises(ConsumedState):
        _ = rft.recover(begun)


def test_but_not_from_one_whose_type_would_be_a_lie(begun: State) -> None:
    with failing(begun, "wake_cache"), pytest.raises(EngineFailed):
        _ = rft.wake(rft.offload_actor(rft.broadcast(begun)))
    with pytest.raises(ConsumedState, match="Offloaded"):
        _ = rft.recover(begun)


def test_nor_from_a_copy(begun: State) -> None:
    other = copy.copy(begun)
    with failing(begun, "load"), pytest.raises(EngineFailed):
        _ = rft.broadcast(begun)
    with pytest.raises(ConsumedState):
        _ = rft.recover(other)
    _ = rft.recover(begun)


def test_a_failure_before_the_first_write_leaves_the_state_living(begun: State) -> None:
    with failing(begun, "manifest"), pytest.raises(InjectedFault):
        _ = rft.broadcast(begun)
    assert "broadcast" in rft.legal(begun)
    _ = rft.broadcast(begun)


def test_nothing_leads_on_from_a_spent_state_where_the_runtime_is_poisoned(begun: State) -> None:
    state, rollouts = with_old(begun)
    with failing(state, "step"), pytest.raises(RuntimePoisoned):
        _ = trained(state, rollouts)
    with pytest.raises(ConsumedState):
        _ = rft.recover(begun)


def test_any_other_failure_poisons_the_runtime(begun: State) -> None:
    state, rollouts = with_old(begun)
    with failing(state, "step"), pytest.raises(RuntimePoisoned, match=r"state, run = restore.*leave `launch`"):
        _ = trained(state, rollouts)
    assert rft.legal(state) == ("restore",)
    for step in (rft.sleep, rft.recover):
        with pytest.raises(RuntimePoisoned, match=rf"{step.__name__}\(state\): an earlier step failed half-way \(InjectedFault"):
            _ = step(state)


def test_an_interruption_half_way_passes_unchanged_and_poisons() -> None:
    ledger = Ledger()
    with pytest.raises(KeyboardInterrupt), ledger.irreversible("runtime"):
        raise KeyboardInterrupt
    assert ledger.fault() == "runtime"


def test_what_promises_that_nothing_was_written_poisons_nothing() -> None:
    ledger = Ledger()
    with pytest.raises(ZeroDivisionError), ledger.irreversible("engine", but=(ZeroDivisionError,)):
        raise ZeroDivisionError
    assert ledger.fault() is None


def test_a_failure_keeps_its_kind_and_its_cause() -> None:
    ledger = Ledger()
    with pytest.raises(rft.SyncFailed) as caught, ledger.irreversible("engine"):
        raise rft.SyncFailed("one tensor differs")
    assert isinstance(caught.value.__cause__, rft.SyncFailed)
    assert "one tensor differs" in str(caught.value)


# ---- the living state, for whoever lost it ----


def test_what_a_composition_had_reached_is_given_for_any_state_that_lived(begun: State) -> None:
    with failing(begun, "wake_cache"), pytest.raises(EngineFailed):
        _ = rft.wake(rft.offload_actor(rft.broadcast(begun)))
    gc.collect()
    reached = rft.living(begun)
    assert joint_of(reached) == (rft.Asleep, rft.Fresh, rft.Offloaded, rft.NoOld)
    assert rft.living(reached) is reached
    assert rft.legal(reached) == ("recover", "restore")
    rested = rft.recover(reached)
    assert rft.living(begun) is rft.living(reached) is rested


def test_it_is_said_where_the_state_given_is_spent(begun: State) -> None:
    _ = rft.broadcast(begun)
    with pytest.raises(ConsumedState, match=r"(?s)the living one is RuntimeState\[Asleep, Fresh.* living\(state\)"):
        _ = rft.broadcast(begun)


@pytest.mark.parametrize("other", [copy.copy, dc.replace, lambda state: first_state(state.devices, Roles())])
def test_it_is_not_given_for_a_state_that_never_lived(begun: State, other: Any) -> None:
    with pytest.raises(ConsumedState, match=r"living\(state\): this object is .* never lives"):
        _ = rft.living(other(begun))
    with pytest.raises(IllegalStep, match="needs a RuntimeState, got int"):
        _ = rft.living(typing.cast(Any, 1))


def test_nothing_is_held_once_launch_has_been_left() -> None:
    gc.collect()
    gc.disable()  # what goes has no circle to wait in
    try:
        with scripted_launch() as begun:
            devices = weakref.ref(begun.devices)
            reached = weakref.ref(rft.refresh(begun))
            assert reached() is not None, "nobody else holds it"
        assert reached() is None
        with pytest.raises(RuntimeClosed, match=r"living\(state\): `launch` was left"):
            _ = rft.living(begun)
        del begun
        assert devices() is None
    finally:
        gc.enable()


# ---- what may come next ----


def test_legal_names_what_may_be_called_next(begun: State) -> None:
    def named(state: State) -> set[str]:
        return set(rft.legal(state))

    always = {"broadcast", "recover", "offload", "reload", "rewards", "average", "all_rows", "over_ranks"}
    always |= {"export", "restore"}
    on_device = {"offload_actor", "compute_old_logprobs", "adopt_logprobs", "supervised_step"}
    assert named(begun) == always | on_device | {"save"}
    state = rft.broadcast(begun)
    assert named(begun) == {"restore"}
    assert named(state) == always | on_device | {"wake", "save"}
    state = rft.wake(state)
    awake = {"generate", "generate_stale", "sleep", "sleep_keeping"}
    assert named(state) == always | on_device | awake | {"save"}
    rollouts = sampled(state)
    state = rft.offload_actor(state)
    assert named(state) == always | awake | {"reload_actor", "save"}
    state = rft.compute_old_logprobs(rft.reload_actor(state), rollouts)
    assert named(state) == always | awake | {"offload_actor", "supervised_step", "train_step", "finish_batch"}
    state = trained(state, rollouts)
    assert named(state) == (always | awake | {"offload_actor", "supervised_step", "train_step", "finish_batch"}) - {"generate"}


def test_legal_leaves_out_the_steps_of_models_that_are_not_there(begun: State) -> None:
    own = {"train_critic", "update_ema", "reference_logprobs", "values", "model_rewards"}
    with scripted_launch(beside="own") as state:
        assert set(rft.legal(state)) == set(rft.legal(begun)) | own
    assert not {*own, "export_adapter"} & set(rft.legal(begun))


def test_what_a_backend_cannot_is_said_first_and_is_not_legal() -> None:
    with scripted_launch(engine=False) as state:
        assert not {"broadcast", "wake", "recover", "sleep", "sleep_keeping", "generate", "generate_stale"} & set(rft.legal(state))
        for step in (rft.broadcast, rft.wake, rft.sleep, rft.recover):
            with refused(state, IllegalStep, f"{step.__name__}(state)", "no rollout engine", "LaunchSpec", "legal now: offload_actor"):
                _ = step(typing.cast(Any, state))
    with scripted_launch(keeps=None) as begun:
        state = rft.refresh(begun)
        with refused(state, IllegalStep, "sleep_keeping(state)", "cannot keep its weights", "use sleep"):
            _ = rft.sleep_keeping(state)


# ---- the table ----


def edge(step: Any) -> rft.Edge:
    return TABLE[step.__module__, step.__name__]


def test_routes_are_the_fewest_steps() -> None:
    rested = (rft.Asleep, rft.Stale, rft.OnDevice, rft.NoOld)
    assert [e.name for e in route(rested, edge(rft.generate)) or []] == ["broadcast", "wake"]
    assert route(rested, edge(rft.broadcast)) == []
    assert route(rested, edge(rft.generate), without={"broadcast"}) is None


def test_a_refusal_without_a_way_says_what_is_legal() -> None:
    @rft.transition
    def dream(state: rft.RuntimeState[rft.Asleep, rft.Fresh, A, O], /) -> rft.RuntimeState[rft.Asleep, rft.Stale, A, O]:
        return then(state, state.engine, rft.Stale(None), state.actor, state.old)

    state = living(Recording(broadcast="this one has no engine"))
    with pytest.raises(IllegalStep) as caught:
        _ = dream(typing.cast(Any, state))
    assert "write instead" not in str(caught.value)
    assert "weights is Stale, and must be Fresh" in str(caught.value)
    assert "legal now: " in str(caught.value)


def test_nothing_may_be_legal() -> None:
    state = living(Recording(**dict.fromkeys((e.name for e in TABLE.values()), "no hands")))
    with pytest.raises(IllegalStep, match=r"no hands\n  legal now: nothing"):
        _ = rft.broadcast(state)


def test_rows_are_written_as_lines_of_a_loop() -> None:
    @rft.observation
    def note(state: rft.RuntimeState[rft.Awake, Any, Any, Any], text: str, /, *marks: int, at: int, loud: bool = False, **m: int) -> None:
        del state, text, marks, at, loud, m

    @rft.observation
    def rows(state: rft.RuntimeState, /) -> dict[str, float]:
        return {"generation": state.generation}

    assert written(edge(rft.train_step)) == "state, metrics = train_step(state, minibatch, objective)"
    assert written(edge(rft.generate)) == "rollouts = generate(state, prompts, sampling)"
    assert written(edge(rft.compute_old_logprobs)) == "state = compute_old_logprobs(state, *rollouts)"
    assert written(edge(rft.generate_stale)) == "rollouts = generate_stale(state, prompts, sampling, max_lag=…)"
    assert written(edge(rft.export)) == "path = export(state, path)"
    assert written(edge(rft.average)) == "value = average(state, values)"
    assert written(edge(note)) == "note(state, text, *marks, at=…, **m)"
    assert needs(edge(note)) == "[Awake, any, any, any]"
    assert needs(edge(rows)) == "[any, any, any, any]"


def test_a_recovery_of_ones_own_heals(begun: State) -> None:
    @recovery
    def begin_again(state: rft.RuntimeState[Any, Any, A, O], /) -> rft.RuntimeState[rft.Asleep, rft.Stale, A, O]:
        engine = scripted_devices(state).engine
        assert engine is not None
        engine.sleep("release")
        return then(state, rft.Asleep(), rft.Stale(None), state.actor, state.old)

    with failing(begun, "load"), pytest.raises(EngineFailed):
        _ = rft.broadcast(begun)
    assert rft.legal(begun) == ("recover", "restore", "begin_again")
    assert rft.legal(begin_again(begun))


def test_a_restoration_of_ones_own_makes_anew_what_is_poisoned_from_any_state_that_lived(begun: State) -> None:
    @restoration
    def start_over(state: State, /) -> tuple[rft.RuntimeState[rft.Asleep, rft.Stale, rft.OnDevice, rft.NoOld], Run]:
        return restored_state(state, rft.OnDevice(), rft.PolicyVersion(0), generation=40), typing.cast(Any, "more")

    assert written(edge(start_over)) == "state, run = start_over(state)"
    state, rollouts = with_old(begun)
    with failing(state, "step"), pytest.raises(RuntimePoisoned):
        _ = trained(state, rollouts)
    assert rft.legal(begun) == rft.legal(state) == ("restore", "start_over")
    for copied in (copy.copy(state), dc.replace(state)):
        assert rft.legal(copied) == ()
        with pytest.raises(ConsumedState, match=r"start_over\(state\)"):
            _ = start_over(copied)
    after, more = start_over(begun)
    assert (after.generation, more) == (41, "more")
    assert after.devices.ledger.fault() is None
    assert rft.describe(start_over(state)[0]) == "RuntimeState[Asleep, Stale, OnDevice, NoOld] (version 0, generation 42)"


def test_a_restoration_gives_a_state_that_is_newer_than_all(begun: State) -> None:
    @restoration
    def go_back(state: State, /) -> rft.RuntimeState[rft.Asleep, rft.Stale, rft.OnDevice, rft.NoOld]:
        return then(state, rft.Asleep(), rft.Stale(None), rft.OnDevice(), rft.NoOld())

    _ = rft.broadcast(rft.broadcast(begun))
    with pytest.raises(BrokenInvariant, match="go_back returned"):
        _ = go_back(begun)


def test_nothing_is_restored_after_launch_or_inside_another_step(begun: State) -> None:
    with pytest.raises(IllegalStep, match=r"restore\(state\) was called inside average"):
        _ = rft.average(begun, {"x": (float(bool(restore(begun, Path(), None))) for _ in range(1))})
    begun.devices.ledger.close()
    assert rft.legal(begun) == ()
    with pytest.raises(RuntimeClosed):
        _ = restore(begun, Path(), None)


def test_the_librarys_rows_are_of_its_steps_alone() -> None:
    modules = {module for module, _ in TABLE}
    assert {"rft.steps", "rft.testing.scripted"} <= modules
    assert Path(rft.__file__).parent.name == "rft"


@pytest.mark.parametrize("given", [None, 3, "a state"])
def test_what_is_legal_after_no_state_is_refused(given: Any) -> None:
    with pytest.raises(IllegalStep, match=rf"legal\(state\) needs a RuntimeState, got {type(given).__name__}"):
        _ = rft.legal(given)

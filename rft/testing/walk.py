"""A random walk over all states ever made and all steps, legal and illegal, with failures at any point of any effect.

The walk holds, after every call:

- A legal step on the living state works. Everything else raises: the right error, and nothing has changed, on no device.
- No state that was ever made has been mutated.
- What a state says is so: `Fresh` means that the engine holds exactly the Actor's weights, `Awake` that its cache is mapped,
  `OnDevice` that the Actor is there; a transition changes the axes that its annotation names, and one `then`.
- A failure before the first write leaves the state living. One in an engine's effect poisons the engine alone, and `recover` leads
  on from the state last held; any other poisons the runtime.

Use it for steps of your own:

    from hypothesis.stateful import run_state_machine_as_test
    from rft.testing import LIBRARY, Call, walk

    def test_my_step_keeps_the_contract():
        run_state_machine_as_test(walk(*LIBRARY, Call(my_step)))
"""

import contextlib
import copy
import dataclasses as dc
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rft import tree
from rft.errors import ConsumedState, EngineFailed, EnginePoisoned, IllegalStep, RftError, RuntimeClosed, RuntimePoisoned
from rft.experience import Rollouts
from rft.ledger import joint_of
from rft.state import Awake, Fresh, OnDevice, RuntimeState
from rft.steps import broadcast, generate, wake
from rft.testing.calls import LIBRARY, SAMPLING, Arguments, Call, State
from rft.testing.faults import InjectedFault
from rft.testing.scripted import scripted_devices, scripted_launch, scripted_prompts

Disguise = Callable[[State], State]


def _rebuilt(state: State) -> State:
    return RuntimeState(**{f.name: getattr(state, f.name) for f in dc.fields(state)})


DISGUISES: dict[str, Disguise] = {
    "itself": lambda state: state,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dc.replace,
    "tree_map": lambda state: tree.tree_map(torch.Tensor.clone, state),
    "by hand": _rebuilt,
}
"""Ways to make a state that is equal and yet another object; only the first may be used."""

disguises = st.sampled_from(["itself"] * 8 + list(DISGUISES)[1:])
fault_points = st.one_of(st.none(), st.none(), st.integers(min_value=0, max_value=9))
picks = st.integers(min_value=0, max_value=11)


class RuntimeWalk(RuleBasedStateMachine):
    """The state machine behind `walk`; its `calls` are the steps it takes."""

    calls: ClassVar[tuple[Call, ...]] = LIBRARY

    def __init__(self) -> None:
        super().__init__()
        self._launches = contextlib.ExitStack()
        self._states = list[tuple[State, object]]()
        self._rollouts = [_foreign_rollouts()]
        self._living: State
        self._poison: str | None = None

    @initialize()
    def begin(self) -> None:
        """Opens the first launch."""
        self._launch()

    @rule(which=st.integers(min_value=0), call=st.integers(min_value=0), disguise=disguises, pick=picks, fault=fault_points)
    def any_step_on_any_state(self, which: int, call: int, disguise: str, pick: int, fault: int | None) -> None:
        """The whole of the walk: some state, some step, some arguments, perhaps a failure."""
        index = len(self._states) - 1 if which % 3 else which % len(self._states)
        self._attempt(DISGUISES[disguise](self._states[index][0]), self.calls[call % len(self.calls)], pick, fault)

    @rule(call=st.integers(min_value=0), pick=picks, fault=fault_points)
    def a_legal_step(self, call: int, pick: int, fault: int | None) -> None:
        """A step that the axes allow, so that the walk gets far."""
        legal = [c for c in self.calls if c.edge.allows(joint_of(self._living))]
        self._attempt(self._living, legal[call % len(legal)], pick, fault)

    @rule()
    def lead_on(self) -> None:
        """After a failure: recover the engine, or launch anew."""
        if self._poison == "runtime":
            self._launch()
        elif self._poison == "engine":
            self._attempt(self._living, next(c for c in self.calls if c.edge.kind == "recovery"), 0, None)

    @invariant()
    def nothing_is_ever_mutated(self) -> None:
        """Every state is what it was when it was made."""
        for state, snapshot in self._states:
            assert _snapshot(state) == snapshot

    @invariant()
    def what_the_state_says_is_so(self) -> None:
        """The living state's axes against the devices."""
        if not self._states or self._poison is not None:
            return
        state, devices = self._living, scripted_devices(self._living)
        engine, trainer = devices.engine, devices.trainer
        assert engine is not None
        assert engine.awake == (type(state.engine) is Awake)
        assert trainer.on_device["model"] == (type(state.actor) is OnDevice)
        assert all(float(value) == state.version for tensor in trainer.weights.values() for value in tensor)
        if type(state.weights) is Fresh:
            assert engine.weights is not None
            assert _values(engine.weights) == _values(trainer.weights)
            assert state.weights.version == state.version

    def teardown(self) -> None:
        """Leaves all launches."""
        self._launches.close()

    def rollouts(self, pick: int) -> Rollouts:
        """The newest, or some older ones."""
        return self._rollouts[-1] if pick % 3 else self._rollouts[pick % len(self._rollouts)]

    def _launch(self) -> None:
        self._launches.close()
        state = self._launches.enter_context(scripted_launch())
        self._poison, self._living = None, state
        self._remember(state)

    def _remember(self, state: State) -> None:
        self._living = state
        self._states.append((state, _snapshot(state)))

    def _attempt(self, state: State, call: Call, pick: int, fault: int | None) -> None:
        arguments = call.arguments(self, pick)
        faults = scripted_devices(self._living).faults
        expected = self._refusals(state, call, arguments)
        before = _devices_snapshot(self._living)
        faults.arm(fault)
        try:
            result = call.step(state, *arguments[0], **arguments[1])
        except (RftError, InjectedFault) as error:
            self._failed(error, expected, before)
        else:
            assert not expected, f"{call.edge.name} was taken, and should have raised one of {expected}"
            assert not faults.fired(), f"{call.edge.name} hid a failure"
            self._succeeded(call, state, result)
        finally:
            faults.arm(None)

    def _refusals(self, state: State, call: Call, arguments: Arguments) -> set[type[RftError]]:
        if state.devices is not self._living.devices:
            return {RuntimeClosed}
        if state is not self._living:
            return {ConsumedState}
        if self._poison == "runtime":
            return {RuntimePoisoned}
        if self._poison == "engine" and call.edge.kind != "recovery":
            return {EnginePoisoned}
        return call.refusals(state, arguments) if call.edge.allows(joint_of(state)) else {IllegalStep}

    def _failed(self, error: Exception, expected: set[type[RftError]], before: object) -> None:
        faults = scripted_devices(self._living).faults
        if type(error) in expected:
            assert _devices_snapshot(self._living) == before, "a refused step changed a device"
            return
        assert faults.fired(), f"an unexpected {error!r}; expected {expected or 'none'}"
        written = next((hit for hit in faults.hits if hit.writes), None)
        if written is None:
            assert type(error) is InjectedFault
            assert _devices_snapshot(self._living) == before, "a failure before the first write changed a device"
        elif written.owner == "engine":
            assert isinstance(error, EngineFailed), error
            self._poison = "engine"
        else:
            assert isinstance(error, RuntimePoisoned), error
            self._poison = "runtime"

    def _succeeded(self, call: Call, state: State, result: Any) -> None:
        if call.edge.kind == "observation":
            if isinstance(result, Rollouts):
                assert result.versions[result.sampled].unique().tolist() in ([state.weights.version], [])
                self._rollouts.append(result)
            return
        follower = result[0] if isinstance(result, tuple) else result
        assert isinstance(follower, RuntimeState)
        assert joint_of(follower) == call.edge.apply(joint_of(state)), "the axes are not those of the annotation"
        assert follower.generation == state.generation + 1
        if call.edge.kind == "recovery":
            self._poison = None
        self._remember(follower)


def walk(*calls: Call) -> type[RuntimeWalk]:
    """The walk over the given steps (all of `LIBRARY`, if none is given), for `run_state_machine_as_test`."""
    return type("Walk", (RuntimeWalk,), {"calls": calls or LIBRARY})


def _foreign_rollouts() -> Rollouts:
    """Rollouts of another launch."""
    with scripted_launch() as state:
        return dc.replace(generate(wake(broadcast(state)), scripted_prompts(), SAMPLING), batch="of another launch")


def _snapshot(state: State) -> object:
    leaves = [leaf.tolist() for leaf in tree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return joint_of(state), state.engine, state.weights, state.actor, state.roles, state.version, state.generation, leaves


def _devices_snapshot(state: State) -> object:
    """Everything on the scripted devices, by value."""
    engine, trainer = scripted_devices(state).engine, scripted_devices(state).trainer
    held = None if engine is None else (engine.awake, _values(engine.weights or {}))
    return held, _values(trainer.weights), trainer.moments.tolist(), dict(trainer.on_device)


def _values(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def refuses_pickling(state: State) -> bool:
    """Whether a state refuses to be pickled, as it must."""
    try:
        _ = pickle.dumps(state)
    except ConsumedState:
        return True
    return False

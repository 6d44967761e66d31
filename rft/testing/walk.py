"""A random walk over all states ever made and all steps, legal and illegal, with failures at any point of any effect.

The walk holds, after every call:

- A legal step on the living state works. Everything else raises: the right error, and nothing has changed, on no device.
- No state that was ever made has been mutated.
- What a state says is so. `Fresh` means that the engine holds exactly the Actor's weights, `Stale(v)` that it holds those of v;
  `Awake` that its cache is mapped; `OnDevice`, and a role's placement, that it is there. A transition changes the axes that its
  annotation names, counts one generation, and a version if it trains.
- Sampled log-probs are those of the weights that their version names, and old log-probs are those of the batch and version that
  they name.
- A failure before the first write leaves the state living. One in an engine's effect poisons the engine alone, and `recover` leads
  on from the state last held; any other poisons the runtime, and `restore` leads on from any state that ever lived.

Use it for steps of your own:

    from hypothesis.stateful import run_state_machine_as_test
    from rft.testing import LIBRARY, Call, walk

    def test_my_step_keeps_the_contract():
        run_state_machine_as_test(walk(*LIBRARY, Call(my_step)))

A `Call` says how to make the step's other arguments, and which errors the step must raise although the axes allow it. The walk runs on
`scripted_launch`; `tally=Counter()` counts what it did, which tells whether it got where you wanted it.
"""

import contextlib
import copy
import dataclasses as dc
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rft import tree
from rft.effects.runtime import runtime_of
from rft.engines.faults import InjectedFault
from rft.engines.scripted import scripted_logprob
from rft.errors import ConsumedState, EngineFailed, EnginePoisoned, IllegalStep, RftError, RuntimeClosed, RuntimePoisoned, WrongBatch
from rft.experience import Rollouts
from rft.ledger import joint_of, legal
from rft.ledger.admission import living
from rft.ledger.table import route
from rft.state import AXES, EMA, Awake, BatchId, NoOld, OldLogProbs, OnDevice, RuntimeState
from rft.steps import broadcast, generate, wake
from rft.testing.calls import LIBRARY, SAMPLING, Arguments, Call, State
from rft.testing.scripted import (
    Company,
    scripted_average,
    scripted_devices,
    scripted_launch,
    scripted_prompts,
    scripted_roles,
    scripted_snapshot,
)

SCORING = ("compute_old_logprobs", "adopt_logprobs")
"""Steps that take a batch in hand, and refuse one of another Actor."""
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

LAUNCHES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"keeps": "host"},
    {"keeps": None},
    {"engine": False},
    {"device_bytes": 470},
)
"""Runtimes to walk on, the ordinary one most often; 470 bytes do not hold everything at a time."""

disguises = st.sampled_from(["itself"] * 8 + list(DISGUISES)[1:])
launches = st.sampled_from(LAUNCHES)
companies = st.sampled_from((None, "own", "own", "by actor"))
# Most steps reach one verb or two, a broadcast a dozen.
fault_points = st.sampled_from([*[None] * 12, *[0] * 6, *[1] * 4, 2, 2, *range(3, 12)])
picks = st.integers(min_value=0, max_value=59)
numbers = st.integers(min_value=0, max_value=1 << 16)


class RuntimeWalk(RuleBasedStateMachine):
    """The state machine behind `walk`; its `calls` are the steps it takes, and `tally` counts them by name and outcome."""

    calls: ClassVar[tuple[Call, ...]] = LIBRARY
    tally: ClassVar[Counter[tuple[str, str]]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self._launches, self._rest = contextlib.ExitStack(), contextlib.ExitStack()
        self.folder = Path(self._rest.enter_context(tempfile.TemporaryDirectory()))
        self._states = list[tuple[State, object]]()
        self._rollouts = [_foreign_rollouts()]
        self._living: State
        self._poison: str | None = None
        self._company: Company | None = None
        self._average = 0.0

    @initialize(abilities=launches, beside=companies)
    def begin(self, abilities: dict[str, Any], beside: Company | None) -> None:
        """Opens the first launch; later ones have the same company, so that they can go on from each other's checkpoints."""
        self._company = beside
        self._launch(abilities)

    @rule(which=numbers, call=numbers, disguise=disguises, pick=picks, fault=fault_points)
    def any_step_on_any_state(self, which: int, call: int, disguise: str, pick: int, fault: int | None) -> None:
        """The whole of the walk: some state, some step, some arguments, perhaps a failure."""
        index = len(self._states) - 1 if which % 3 else which % len(self._states)
        self._attempt(DISGUISES[disguise](self._states[index][0]), self.calls[call % len(self.calls)], pick, fault)

    @rule(call=numbers, pick=picks, fault=fault_points)
    def a_legal_step(self, call: int, pick: int, fault: int | None) -> None:
        """A step that the axes allow, perhaps with a failure."""
        allowed = [c for c in self.calls if c.edge.allows(joint_of(self._living))]
        self._attempt(self._living, allowed[call % len(allowed)], pick, fault)

    @precondition(lambda self: self._poison is None)
    @rule(choices=st.lists(st.tuples(numbers, picks), min_size=2, max_size=6))
    def some_legal_steps(self, choices: list[tuple[int, int]]) -> None:
        """Several of them, of those that lead on, so that the walk gets far."""
        for number, pick in choices:
            named = legal(self._living)
            leading_on = [c for c in self.calls if c.edge.name in named and c.edge.kind not in ("recovery", "restoration")]
            self._attempt(self._living, leading_on[number % len(leading_on)], pick, None)
            self.what_the_state_says_is_so()

    @precondition(lambda self: self._poison is None)
    @rule(call=numbers, pick=picks, fault=fault_points)
    def a_step_and_the_way_to_it(self, call: int, pick: int, fault: int | None) -> None:
        """Any step, by the fewest steps that lead to where it is allowed, so that the walk gets everywhere."""
        goal = self.calls[call % len(self.calls)]
        for _ in range(len(AXES)):
            way = route(joint_of(self._living), goal.edge, without=self._living.devices.cannot)
            first = next((c for c in self.calls if way and c.edge is way[0]), None)
            if first is None:
                break
            self._attempt(self._living, first, pick, None)
        self._attempt(self._living, goal, pick, fault)

    @precondition(lambda self: self._poison == "engine")
    @rule(which=numbers, fault=fault_points)
    def recover(self, which: int, fault: int | None) -> None:
        """After a failure of the engine: from the living state, or from an older one, if that is all that is held."""
        state = self._living if which % 2 else self._states[which % len(self._states)][0]
        self._attempt(state, next(c for c in self.calls if c.edge.kind == "recovery"), 0, fault)

    @precondition(lambda self: self._poison == "runtime")
    @rule(abilities=launches)
    def launch_anew(self, abilities: dict[str, Any]) -> None:
        """After any other failure."""
        self._launch(abilities)

    @invariant()
    def nothing_is_mutated(self) -> None:
        """The newest states are what they were when they were made; all others are looked at in the end."""
        for state, snapshot in self._states[-2:]:
            assert _snapshot(state) == snapshot

    @precondition(lambda self: bool(self._states))
    @invariant()
    def only_the_newest_lives(self) -> None:
        """And it may take exactly the steps that `legal` names; whoever has one of this launch can have it."""
        for state in (self._living, self._states[0][0]):
            assert state.devices is not self._living.devices or living(state) is self._living
            named = set(legal(state)) & {call.edge.name for call in self.calls}
            allowed = {call.edge.name for call in self.calls if not self._refusals(state, call, None)}
            assert named == allowed - state.devices.lacking

    @precondition(lambda self: bool(self._states) and self._poison is None)
    @invariant()
    def what_the_state_says_is_so(self) -> None:
        """The living state against the devices."""
        state, devices = self._living, scripted_devices(self._living)
        trainer = devices.trainer
        assert _every_value(trainer.weights, state.version)
        assert trainer.on_device["model"] == (type(state.actor) is OnDevice)
        for role, there in scripted_roles(state).items():
            assert (state.roles.of(role).where == "device") == there, role
        if self._company is not None:
            assert _every_value(scripted_average(state).weights, self._average)
        if devices.engine is not None:
            assert devices.engine.awake == (type(state.engine) is Awake)
            assert _every_value(devices.engine.weights, state.weights.version)
        if isinstance(state.old, OldLogProbs):
            self._check_old(state.old)

    def teardown(self) -> None:
        """Leaves all launches; no state that was ever made has been mutated, and none can be pickled."""
        self._launches.close()
        self._rest.close()
        assert not self._states or _refuses_pickling(self._living)
        for state, snapshot in self._states:
            assert _snapshot(state) == snapshot

    def rollouts(self, pick: int) -> Rollouts:
        """Those of the batch in hand, if there is one, or else the newest; now and then any others."""
        if pick % 3 == 0:
            return self._rollouts[pick // 3 % len(self._rollouts)]
        old = self._living.old
        return self._of_batch(old.batches[0].batch) if isinstance(old, OldLogProbs) else self._rollouts[-1]

    def _launch(self, abilities: dict[str, Any]) -> None:
        self._launches.close()
        self._poison, self._average = None, 0.0
        self._remember(self._launches.enter_context(scripted_launch(**abilities, beside=self._company)))

    def _remember(self, state: State) -> None:
        self._living = state
        self._states.append((state, _snapshot(state)))

    def _attempt(self, state: State, call: Call, pick: int, fault: int | None) -> None:
        arguments = call.arguments(self, pick)
        faults = scripted_devices(self._living).faults
        expected = self._refusals(state, call, arguments)
        before = scripted_snapshot(self._living)
        faults.arm(fault)
        try:
            result = call.step(state, *arguments[0], **arguments[1])
        except (RftError, InjectedFault) as error:
            self.tally[call.edge.name, type(error).__name__] += 1
            self._failed(call, error, expected, before)
        else:
            assert not expected, f"{call.edge.name} was taken, and should have raised one of {expected}"
            assert not faults.fired(), f"{call.edge.name} hid a failure"
            self.tally[call.edge.name, "taken"] += 1
            self._succeeded(call, arguments, result)
        finally:
            faults.arm(None)

    def _refusals(self, state: State, call: Call, arguments: Arguments | None) -> set[type[RftError]]:
        """Which errors the call must raise; without arguments, those that the ledger alone decides on."""
        if state.devices is not self._living.devices:
            return {RuntimeClosed}
        if call.edge.kind == "restoration" and self._once_lived(state):
            return call.refusals(self._living, arguments) if arguments else set()
        if state is not self._living and not (arguments and call.edge.kind == "recovery" and self._led_here(state)):
            return {ConsumedState}
        if self._poison == "runtime":
            return {RuntimePoisoned}
        if self._poison == "engine" and call.edge.kind != "recovery":
            return {EnginePoisoned}
        if call.edge.name in state.devices.cannot or not call.edge.allows(joint_of(self._living)):
            return {IllegalStep}
        if arguments and call.step.__name__ in SCORING and runtime_of(self._living).lineage.is_of_another(arguments[0][0]):
            return {WrongBatch}
        return call.refusals(self._living, arguments) if arguments else set()

    def _led_here(self, state: State) -> bool:
        """Whether `recover` takes `state` for the living one: a spent one, while the engine is poisoned, if the result's type is true."""
        return self._poison == "engine" and self._once_lived(state) and joint_of(state)[2:] == joint_of(self._living)[2:]

    def _once_lived(self, state: State) -> bool:
        return any(state is known for known, _ in self._states)

    def _failed(self, call: Call, error: Exception, expected: set[type[RftError]], before: object) -> None:
        faults = scripted_devices(self._living).faults
        if type(error) in expected:
            assert scripted_snapshot(self._living) == before, "a refused step changed a device"
            return
        assert faults.fired(), f"an unexpected {error!r}; expected {expected or 'none'}"
        written = next((hit for hit in faults.hits if hit.writes), None)
        if call.edge.kind == "restoration" and isinstance(error, RuntimePoisoned):
            self._poison = "runtime"
        elif written is None:
            assert type(error) is InjectedFault
            assert scripted_snapshot(self._living) == before, "a failure before the first write changed a device"
        elif written.owner == "engine":
            assert isinstance(error, EngineFailed), error
            self._poison = "engine"
        else:
            assert isinstance(error, RuntimePoisoned), error
            self._poison = "runtime"

    def _succeeded(self, call: Call, arguments: Arguments, result: Any) -> None:
        if call.edge.kind == "observation":
            if call.step.__name__ == "reference_logprobs":
                version = self._average if arguments[1]["role"] == EMA else 0
                assert torch.equal(result, _exact(arguments[0][0], version))
            if isinstance(result, Rollouts):
                assert result.versions[result.sampled].unique().tolist() in ([self._living.weights.version], [])
                assert torch.equal(result.logprobs, _exact(result, self._living.weights.version))
                self._rollouts.append(result)
            return
        follower = result[0] if isinstance(result, tuple) else result
        assert isinstance(follower, RuntimeState)
        assert joint_of(follower) == call.edge.apply(joint_of(self._living)), "the axes are not those of the annotation"
        newer = follower.generation - self._living.generation
        assert newer > 0 if call.edge.kind == "restoration" else newer == 1
        if isinstance(follower.old, OldLogProbs):
            self._check_count(call, self._living, follower.old)
        if call.edge.kind in ("recovery", "restoration"):
            self._poison = None
        self._follow_average(call, follower)
        self._remember(follower)

    def _follow_average(self, call: Call, follower: State) -> None:
        """What the moving average must be now; after `restore`, and in a new launch, that is looked up."""
        if self._company is None:
            return
        if call.step.__name__ == "update_ema":
            self._average = (0.25 * torch.tensor(self._average) + 0.75 * torch.tensor(float(follower.version))).item()
        elif call.edge.kind == "restoration":
            self._average = scripted_average(follower).weights["head"].item()

    def _check_count(self, call: Call, before: State, old: OldLogProbs) -> None:
        """Old log-probs are born with the version of their state, and count the steps that were taken on them."""
        if isinstance(before.old, OldLogProbs):
            trained = NoOld not in call.edge.before[3]
            assert (old.version, old.steps) == (before.old.version, before.old.steps + trained)
        else:
            assert (old.version, old.steps) == (before.version, 0)

    def _of_batch(self, batch: BatchId) -> Rollouts:
        return next(rollouts for rollouts in self._rollouts if rollouts.batch == batch)

    def _check_old(self, old: OldLogProbs) -> None:
        for part in old.batches:
            rollouts = self._of_batch(part.batch)
            if part.values is None:
                assert old.source == "first_step"
            else:
                assert torch.equal(part.values, _exact(rollouts, old.version) if old.source == "actor" else rollouts.logprobs)


def walk(*calls: Call, tally: Counter[tuple[str, str]] | None = None) -> type[RuntimeWalk]:
    """The walk over the given steps (all of `LIBRARY`, if none is given), for `run_state_machine_as_test`.

    `tally` counts every attempt by the step's name and what came of it: `taken`, or the error's name.
    """
    return type("Walk", (RuntimeWalk,), {"calls": calls or LIBRARY, "tally": Counter() if tally is None else tally})


def _foreign_rollouts() -> Rollouts:
    """Rollouts of another launch."""
    with scripted_launch() as state:
        return generate(wake(broadcast(state)), scripted_prompts(), SAMPLING)


def _snapshot(state: State) -> object:
    leaves = [leaf.tolist() for leaf in tree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    return joint_of(state), state.engine, state.weights, state.actor, state.roles, state.version, state.generation, leaves


def _every_value(tensors: dict[str, torch.Tensor] | None, expected: float | None) -> bool:
    """Whether scripted weights are those of a version; None: that there are none."""
    return (tensors is None) == (expected is None) and all(bool((tensor == expected).all()) for tensor in (tensors or {}).values())


def _exact(rollouts: Rollouts, version: float) -> torch.Tensor:
    """The log-probs of sampled tokens under the scripted weights of a version, which are `version` three times."""
    values = torch.zeros(rollouts.tokens.shape)
    for row, column in rollouts.sampled.nonzero().tolist():
        values[row, column] = scripted_logprob(3.0 * version, tuple(rollouts.tokens[row, : column + 1].tolist()))
    return values


def _refuses_pickling(state: State) -> bool:
    try:
        _ = pickle.dumps(state)
    except ConsumedState:
        return True
    return False

"""The walk holds for the library's steps, gets far, and finds bugs that are seeded into copies of the steps and effects."""

import pickle
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

import rft
import rft.steps
from rft.effects import beside, checkpoint, placement, rollout, scoring, sync, training
from rft.ledger import TABLE
from rft.testing import LIBRARY, Call, scripted_launch, walk

# Many walks of twenty runs get further than one of as many runs, which are much alike. A failure is not made smaller here: that
# may take minutes; run the walk by itself for it, with `Phase.shrink`.
COUNTED, WALKS = 10, 30
QUICK = settings(
    derandomize=False,  # hypothesis turns it on by itself under CI=true, and every walk would be the same one
    max_examples=20,
    stateful_step_count=50,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
SLOW = settings(QUICK, max_examples=3000, stateful_step_count=100)


@pytest.fixture(autouse=True)
def _table_is_left_as_it_was() -> Iterator[None]:
    """The rows of seeded steps are gone after the test."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


@pytest.fixture(scope="module")
def tally() -> Counter[tuple[str, str]]:
    """What two hundred runs of fifty moves did."""
    counted = Counter[tuple[str, str]]()
    for number in range(COUNTED):
        run_state_machine_as_test(seed(number)(walk(tally=counted)), settings=QUICK)
    return counted


# ---- it holds, and it gets far ----


@pytest.mark.parametrize("call", LIBRARY, ids=lambda call: call.edge.name)
def test_every_step_is_taken_often(tally: Counter[tuple[str, str]], call: Call) -> None:
    # Hypothesis draws from the constants in all loaded sources, too: the same seeds give other walks when one of them changes.
    assert tally[call.edge.name, "taken"] >= 5, dict(tally)


@pytest.mark.parametrize(
    ("error", "least"),
    [
        ("ConsumedState", 150),
        ("IllegalStep", 150),
        ("EngineFailed", 30),
        ("EnginePoisoned", 30),
        ("RuntimePoisoned", 10),
        ("RuntimeClosed", 3),
        ("InjectedFault", 30),
        ("RoleError", 50),
        ("WrongBatch", 1),
        ("TooStale", 5),
        ("DoesNotFit", 1),
    ],
)
def test_every_kind_of_refusal_and_failure_is_met(tally: Counter[tuple[str, str]], error: str, least: int) -> None:
    assert sum(count for (_, outcome), count in tally.items() if outcome == error) >= least, dict(tally)


@pytest.mark.slow
def test_it_holds_over_a_long_walk() -> None:
    run_state_machine_as_test(walk(), settings=SLOW)


def test_pickles_are_refused_at_any_point() -> None:
    with scripted_launch() as begun:
        for state in (begun, rft.broadcast(begun)):
            with pytest.raises(rft.ConsumedState):
                _ = pickle.dumps(state)


# ---- bugs that it finds ----


def seeded(name: str, module: types.ModuleType, *changes: tuple[str, str], **names: object) -> Any:
    """A copy of a module under another name, with parts of its text replaced and some of its names bound anew."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} is in {module.__name__} {source.count(old)} times"
        source = source.replace(old, new)
    copied = types.ModuleType(name)
    exec(compile(source, name, "exec"), vars(copied))
    vars(copied).update(names)
    return copied


def calls_of(steps: Any) -> tuple[Call, ...]:
    """The library's calls, of a copy of its steps."""
    return tuple(Call(getattr(steps, call.step.__name__), call.arguments, call.refusals) for call in LIBRARY)


# fmt: off
STEPS: dict[str, tuple[tuple[str, str], ...]] = {
    "wake accepts stale weights": (
        ("wake(state: RuntimeState[Asleep, Fresh, A, O], /) -> RuntimeState[Awake, Fresh, A, O]:",
         "wake(state: RuntimeState[Asleep, W, A, O], /) -> RuntimeState[Awake, W, A, O]:"),
    ),
    "broadcast installs nothing": (("sync.broadcast(state)", "Fresh(state.version)"),),
    "train_step leaves the weights fresh": (
        ("[RuntimeState[E, Stale, OnDevice, OldLogProbs], Metrics]:", "[RuntimeState[E, Fresh, OnDevice, OldLogProbs], Metrics]:"),
        ("(state, engine, weights, state.actor, after_step(", "(state, engine, Fresh(version), state.actor, after_step("),
    ),
    "train_step counts no version": (("after_step(state.old), version=version), metrics", "after_step(state.old)), metrics"),),
    "supervised_step counts no version": (("state.actor, state.old, version=version), metrics", "state.actor, state.old), metrics"),),
    "train_step counts no step on the batch": (("after_step(state.old)", "state.old"),),
    "sleep keeps the weights fresh": (
        ("sleep(state: RuntimeState[Awake, Fresh | Stale, A, O], /) -> RuntimeState[Asleep, Stale, A, O]:",
         "sleep(state: RuntimeState[Awake, W, A, O], /) -> RuntimeState[Asleep, W, A, O]:"),
        ('placement.sleep(state, "release"), Stale(None)', 'placement.sleep(state, "release"), state.weights'),
    ),
    "sleep_keeping releases": (('placement.sleep(state, "keep")', 'placement.sleep(state, "release")'),),
    "sleep does nothing": (('placement.sleep(state, "release")', "Asleep()"),),
    "recover does nothing": (("placement.recover(state)", "Asleep()"),),
    "offload_actor does nothing": (("placement.offload_actor(state)", "Offloaded()"),),
    "offload forgets the placement": (("roles=placement.offload(state, role)", "roles=(placement.offload(state, role), state.roles)[1]"),),
    "restore gives the version of the state that it was given": (("back.actor, back.version,", "back.actor, state.version,"),),
    "generate_stale forgets the lag": (("    rollout.check_lag(state, max_lag)\n", ""),),
    "finish_batch steps twice": (
        ("then(state, state.engine, state.weights, state.actor, NoOld())",
         "then(then(state, state.engine, state.weights, state.actor, NoOld()), state.engine, state.weights, state.actor, NoOld())"),
    ),
}

EFFECTS: dict[str, tuple[types.ModuleType, str, str]] = {
    "a broadcast that does not drop the prefix cache": (sync, "            runtime.engine.flush()\n", ""),
    "a broadcast whose failure poisons nothing": (sync, "with runtime.engine_effect():", "if True:"),
    "a broadcast that touches before it may": (
        sync, "    _require_room(state, runtime)\n", "    runtime.engine.wake_weights()\n    _require_room(state, runtime)\n"
    ),
    "a wake that asks for no room": (placement, 'require_room("wake(state)", state,', "_ = (state,"),
    "a move whose failure poisons nothing": (
        placement,
        'with runtime.ledger.irreversible("runtime"):\n        runtime.movable[role].reload()',
        "if True:\n        runtime.movable[role].reload()",
    ),
    "a failed engine that poisons the whole runtime": (
        placement,
        "with runtime.engine_effect():\n        runtime.engine.sleep(weights)",
        'with runtime.ledger.irreversible("runtime"):\n        runtime.engine.sleep(weights)',
    ),
    "rollouts of a version too new": (rollout, "    version = state.weights.version\n", "    version = state.version\n"),
    "a lag that nobody checks": (scoring, "_lag(state, [r]) > max_lag:", "False:"),
    "old log-probs that are scaled": (scoring, "or 1.0, r.images) for r", "or 1.0, r.images) * 1.5 for r"),
    "old log-probs of another source": (scoring, 'values=r.logprobs if source == "engine" else None', "values=r.logprobs * 0.5"),
    "old log-probs that name another version": (
        scoring,
        "OldLogProbs(version=state.version, batches=batches, source=source, lag=_lag(state, rollouts))",
        "OldLogProbs(version=type(state.version)(0), batches=batches, source=source, lag=_lag(state, rollouts))",
    ),
    "a first step that may be taken twice": (scoring, 'if old.source == "first_step" and old.steps:', "if False:"),
    "a restore that installs nothing": (checkpoint, "            of.install({", "            dict({"),
    "a restore that leaves the engine as it is": (checkpoint, '            runtime.engine.sleep("release")\n', "            pass\n"),
    "a restore that leaves roles where they are": (checkpoint, "        _to_places(state, runtime)\n", ""),
    "a restore whose failure poisons nothing": (
        checkpoint,
        'with runtime.ledger.irreversible("runtime"), runtime.lockstep.agreement():',
        "with runtime.lockstep.agreement():",
    ),
    "an average that is mixed the wrong way round": (beside, "1 - spec.decay", "spec.decay"),
    "two reward models on the device": (placement, "len(there) >= most", "False"),
    "a reference by an Actor that is away": (beside, "if role in runtime_of(state).beside.by_actor and", "if False and"),
    "a mini-batch of any batch": (scoring, "if batch not in known and batch != DEMONSTRATIONS]", "if False]"),
}
# fmt: on
RARE = (
    "rollouts of a version too new",
    "a first step that may be taken twice",
    "generate_stale forgets the lag",
    "a wake that asks for no room",
    "a failed engine that poisons the whole runtime",
    "a restore that leaves roles where they are",
)
"""Found as surely, and later."""


def is_found(steps: Any, walks: int = WALKS) -> bool:
    """Whether one of the walks fails over a copy of the library's steps."""
    for number in range(walks):
        try:
            run_state_machine_as_test(seed(number)(walk(*calls_of(steps))), settings=QUICK)
        except (AssertionError, KeyError):
            return True
    return False


def test_nothing_is_found_in_a_faithful_copy() -> None:
    steps = seeded("faithful_steps", rft.steps, sync=seeded("faithful_sync", sync))
    run_state_machine_as_test(walk(*calls_of(steps)), settings=QUICK)


def slow_if_rare(bugs: Iterable[str]) -> list[Any]:
    return [pytest.param(bug, marks=[pytest.mark.slow] * (bug in RARE)) for bug in bugs]


def walks_for(bug: str) -> int:
    return WALKS * 7 if bug in RARE else WALKS


@pytest.mark.parametrize("bug", slow_if_rare(STEPS))
def test_a_bug_seeded_into_the_steps_is_found(bug: str) -> None:
    assert is_found(seeded("seeded_steps", rft.steps, *STEPS[bug]), walks_for(bug))


@pytest.mark.parametrize("bug", slow_if_rare(EFFECTS))
def test_a_bug_seeded_into_an_effect_is_found(bug: str) -> None:
    module, old, new = EFFECTS[bug]
    effect = seeded("seeded_effect", module, (old, new))
    effects = {module.__name__.rpartition(".")[2]: effect}
    if module is scoring:
        effects["training"] = seeded("seeded_training", training, join=effect.join)
    assert is_found(seeded("seeded_steps", rft.steps, **effects), walks_for(bug))

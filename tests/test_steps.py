"""The steps at run time: every mistake of a loop is refused with a way on and changes nothing, and the table is the design's."""

import contextlib
import dataclasses as dc
import itertools
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import rft
from rft.effects import budget
from rft.engines.scripted import ScriptedEngine
from rft.errors import (
    BadInput,
    ConsumedState,
    DoesNotFit,
    EngineFailed,
    IllegalStep,
    NonFiniteGradient,
    RanksDiverged,
    RoleError,
    RuntimeClosed,
    RuntimePoisoned,
    TooStale,
    WrongBatch,
)
from rft.ledger import Edge, Joint, joint_of
from rft.state import AXES, Awake, Fresh, NoOld, OldLogProbs, OnDevice
from rft.steps import restore, save, table
from rft.testing import SAMPLING, Faults, scripted_devices, scripted_launch, scripted_minibatch, scripted_prompts
from rft.testing.models import tiny_model
from rft.trainers.scripted import ScriptedTrainer
from tests.refusals import State, failing, refused, sampled, trained, with_old

ROOT = Path(__file__).parents[1]


@pytest.fixture
def begun() -> Iterator[State]:
    with scripted_launch() as state:
        yield state


# ---- what the axes do not allow: for each mistake a way to it, the call, and what the message says ----

PROMPTS, OBJECTIVE = scripted_prompts(), rft.grpo()


@dc.dataclass(frozen=True)
class Mistake:
    """A call that the axes of the state before it forbid; `instead` are the lines that its message proposes."""

    before: Callable[[State], State]
    call: Callable[[State], Any]
    got: str
    needs: str
    instead: tuple[str, ...] = ()
    leave_out: bool = False


def _asleep_and_kept(state: State) -> State:
    return rft.sleep_keeping(rft.refresh(state))


def _discarded(state: State) -> State:
    return rft.sleep(rft.refresh(state))


def _with_old(state: State) -> State:
    return with_old(state)[0]


def _trained(state: State) -> State:
    return trained(*with_old(state))


def _trained_asleep(state: State) -> State:
    batch, rollouts = with_old(state)
    return trained(rft.sleep_keeping(batch), rollouts)


def _actor_away_with_old(state: State) -> State:
    return rft.offload_actor(_with_old(state))


def _foreign() -> rft.Rollouts:
    """Of another launch, by a name that says nothing of it."""
    with scripted_launch() as state:
        return dc.replace(sampled(rft.refresh(state)), batch=rft.BatchId("by hand"))


FOREIGN = _foreign()
MINIBATCH = scripted_minibatch(FOREIGN)
ROLLOUTS = cast(rft.Rollouts, None)
"""Never looked at: the axes come first."""

GENERATE = "rollouts = generate(state, prompts, sampling)"
TRAIN = "state, metrics = train_step(state, minibatch, objective)"

MISTAKES = {
    "generate while asleep": Mistake(
        _asleep_and_kept,
        lambda s: rft.generate(s, PROMPTS, SAMPLING),
        "[Asleep, Fresh, OnDevice, NoOld]",
        "[Awake, Fresh, any, any]",
        ("state = wake(state)", GENERATE),
    ),
    "generate at launch": Mistake(
        lambda s: s,
        lambda s: rft.generate(s, PROMPTS, SAMPLING),
        "[Asleep, Stale, OnDevice, NoOld]",
        "[Awake, Fresh, any, any]",
        ("state = broadcast(state)", "state = wake(state)", GENERATE),
    ),
    "generate after a train step without a broadcast": Mistake(
        _trained,
        lambda s: rft.generate(s, PROMPTS, SAMPLING),
        "[Awake, Stale, OnDevice, OldLogProbs] (version 1, generation 4)",
        "[Awake, Fresh, any, any]",
        ("state = broadcast(state)", GENERATE),
    ),
    "generate_stale while asleep": Mistake(
        _asleep_and_kept,
        lambda s: rft.generate_stale(s, PROMPTS, SAMPLING, max_lag=1),
        "[Asleep, Fresh",
        "[Awake, any, any, any]",
        ("state = wake(state)", "rollouts = generate_stale(state, prompts, sampling, max_lag=…)"),
    ),
    "wake on discarded weights": Mistake(
        _discarded, rft.wake, "[Asleep, Stale", "[Asleep, Fresh, any, any]", ("state = broadcast(state)", "state = wake(state)")
    ),
    "wake on stale weights": Mistake(
        _trained_asleep, rft.wake, "[Asleep, Stale", "[Asleep, Fresh, any, any]", ("state = broadcast(state)", "state = wake(state)")
    ),
    "wake twice": Mistake(rft.refresh, rft.wake, "[Awake, Fresh", "[Asleep, Fresh, any, any]", leave_out=True),
    "sleep twice": Mistake(_discarded, rft.sleep, "[Asleep, Stale", "[Awake, any, any, any]", leave_out=True),
    "sleep_keeping twice": Mistake(_asleep_and_kept, rft.sleep_keeping, "[Asleep, Fresh", "[Awake, any, any, any]", leave_out=True),
    "train with the Actor offloaded": Mistake(
        _actor_away_with_old,
        lambda s: rft.train_step(s, MINIBATCH, OBJECTIVE),
        "[Awake, Fresh, Offloaded, OldLogProbs]",
        "[any, any, OnDevice, OldLogProbs]",
        ("state = reload_actor(state)", TRAIN),
    ),
    "score with the Actor offloaded": Mistake(
        rft.offload_actor,
        lambda s: rft.compute_old_logprobs(s, ROLLOUTS),
        "[Asleep, Stale, Offloaded, NoOld]",
        "[any, any, OnDevice, NoOld]",
        ("state = reload_actor(state)", "state = compute_old_logprobs(state, *rollouts)"),
    ),
    "supervise with the Actor offloaded": Mistake(
        rft.offload_actor,
        lambda s: rft.supervised_step(s, MINIBATCH),
        "[Asleep, Stale, Offloaded, NoOld]",
        "[any, any, OnDevice, any]",
        ("state = reload_actor(state)", "state, metrics = supervised_step(state, minibatch)"),
    ),
    "train without old log-probs": Mistake(
        rft.refresh,
        lambda s: rft.train_step(s, MINIBATCH, OBJECTIVE),
        "[Awake, Fresh, OnDevice, NoOld]",
        "[any, any, OnDevice, OldLogProbs]",
        ("state = compute_old_logprobs(state, *rollouts)", TRAIN),
    ),
    "old log-probs twice": Mistake(
        _with_old,
        lambda s: rft.compute_old_logprobs(s, ROLLOUTS),
        "[Awake, Fresh, OnDevice, OldLogProbs]",
        "[any, any, OnDevice, NoOld]",
        ("state = finish_batch(state)", "state = compute_old_logprobs(state, *rollouts)"),
        leave_out=True,
    ),
    "adopt over old log-probs": Mistake(
        _with_old,
        lambda s: rft.adopt_logprobs(s, ROLLOUTS, source="engine"),
        "[Awake, Fresh, OnDevice, OldLogProbs]",
        "[any, any, OnDevice, NoOld]",
        ("state = finish_batch(state)", "state = adopt_logprobs(state, *rollouts, source=…)"),
        leave_out=True,
    ),
    "finish no batch": Mistake(
        rft.refresh, rft.finish_batch, "[Awake, Fresh, OnDevice, NoOld]", "[any, any, any, OldLogProbs]", leave_out=True
    ),
    "reload an Actor that is there": Mistake(
        rft.refresh, rft.reload_actor, "[Awake, Fresh, OnDevice", "[any, any, Offloaded, any]", leave_out=True
    ),
    "sleep with kept weights, which are to go": Mistake(
        lambda s: rft.sleep_keeping(rft.refresh(s)),
        rft.sleep,
        "[Asleep, Fresh, OnDevice, NoOld]",
        "[Awake, any, any, any]",
        ("state = wake(state)", "state = sleep(state)"),
    ),
    "keep weights that are kept": Mistake(
        lambda s: rft.sleep_keeping(rft.refresh(s)),
        rft.sleep_keeping,
        "[Asleep, Fresh, OnDevice, NoOld]",
        "[Awake, any, any, any]",
        leave_out=True,
    ),
    "offload an Actor that is away": Mistake(
        rft.offload_actor, rft.offload_actor, "[Asleep, Stale, Offloaded", "[any, any, OnDevice, any]", leave_out=True
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_refused_with_the_lines_to_write_and_changes_nothing(begun: State, mistake: Mistake) -> None:
    state = mistake.before(begun)
    with refused(state, IllegalStep, f"the state is RuntimeState{mistake.got}", f"it needs {mistake.needs}") as caught:
        _ = mistake.call(state)
    message = str(caught.value)
    assert re.match(r"\w+\(state\): ", message)
    if mistake.instead:
        assert "write instead:\n" + "".join(f"    {line}\n" for line in mistake.instead) in message
    assert ("leave it out" in message) is mistake.leave_out
    assert message.endswith(f"legal now: {', '.join(rft.legal(state))}")


def test_the_second_pass_of_a_loop_is_refused_too(begun: State) -> None:
    state, rollouts = with_old(begun)
    _ = sampled(state)
    state = trained(state, rollouts)
    with refused(state, IllegalStep, "weights is Stale, and must be Fresh"):
        _ = sampled(state)


@pytest.mark.parametrize("use", [rft.broadcast, rft.offload_actor, lambda s: rft.average(s, {}), lambda s: rft.all_rows(s, torch.ones(1))])
def test_a_consumed_state_is_refused_and_the_newest_named(begun: State, use: Callable[[State], Any]) -> None:
    state = rft.broadcast(begun)
    with refused(state, ConsumedState, "(version 0, generation 0)", "the living one is RuntimeState[Asleep, Fresh", "state = step(state)"):
        _ = use(begun)


def test_on_one_rank_the_rows_of_all_ranks_are_its_own(begun: State) -> None:
    rows = torch.tensor([1.0, 3.0])
    assert rft.all_rows(begun, rows)[0].tolist() == [1.0, 3.0]
    assert rft.over_ranks(begun, lambda x: x - x.mean(), rows).tolist() == [-1.0, 1.0]
    assert rft.legal(begun)


# ---- what the axes allow, and the step refuses ----


def test_an_experience_of_another_batch_is_refused(begun: State) -> None:
    ready = rft.refresh(begun)
    other = sampled(ready)
    rollouts = sampled(ready)
    state = rft.compute_old_logprobs(ready, rollouts)
    mixed = rft.concatenate(*(rft.experience(r, torch.ones(4), torch.ones(r.tokens.shape)) for r in (rollouts, other)))
    for minibatch in (scripted_minibatch(other), rft.take(mixed, torch.tensor([0])), MINIBATCH):
        with refused(state, WrongBatch, "train_step(state, minibatch, objective)", rollouts.batch, "finish_batch(state)"):
            _ = rft.train_step(state, minibatch, OBJECTIVE)
    _ = trained(state, rollouts)


@pytest.mark.parametrize("source", ["actor", "engine"])
def test_rows_beyond_the_batch_are_refused(begun: State, source: str) -> None:
    ready = rft.refresh(begun)
    rollouts = sampled(ready)
    adopt = source == "engine"
    state = rft.adopt_logprobs(ready, rollouts, source="engine") if adopt else rft.compute_old_logprobs(ready, rollouts)
    minibatch = scripted_minibatch(rollouts)
    with refused(state, WrongBatch, "train_step(state, minibatch, objective)", f"row 100 of batch {rollouts.batch}, which has 4 rows"):
        _ = rft.train_step(state, dc.replace(minibatch, rows=minibatch.rows + 100), OBJECTIVE)


def test_batches_of_several_generations_are_trained_on_together(begun: State) -> None:
    ready = rft.refresh(begun)
    parts = (sampled(ready), rft.generate(ready, scripted_prompts(1), SAMPLING, draw=1))
    mixed = rft.concatenate(*(rft.experience(r, torch.ones(len(r)), torch.ones(r.tokens.shape)) for r in parts))
    state = rft.compute_old_logprobs(ready, *parts)
    rows = torch.tensor([5, 0, 4])
    state, metrics = rft.train_step(state, rft.take(mixed, rows), OBJECTIVE)
    assert metrics["ratio_mean"] == 1.0
    assert state.old.steps == 1


def test_first_step_stands_for_exactly_one(begun: State) -> None:
    ready = rft.refresh(begun)
    rollouts = sampled(ready)
    state, metrics = rft.train_step(rft.adopt_logprobs(ready, rollouts, source="first_step"), scripted_minibatch(rollouts), OBJECTIVE)
    assert metrics["ratio_mean"] == 1.0
    with refused(state, WrongBatch, "exactly one step", "state = finish_batch(state)", "compute_old_logprobs"):
        _ = rft.train_step(state, scripted_minibatch(rollouts), OBJECTIVE)
    assert rft.legal(rft.finish_batch(state))


def test_adopting_from_the_engine_takes_the_sampled_ones(begun: State) -> None:
    ready = rft.refresh(begun)
    rollouts = sampled(ready)
    state = rft.adopt_logprobs(ready, rollouts, source="engine")
    (part,) = state.old.batches
    assert part.values is not None
    assert torch.equal(part.values, rollouts.logprobs)
    assert state.old.version == 0
    with refused(state, IllegalStep):
        _ = rft.adopt_logprobs(cast(Any, state), rollouts, source="engine")


def test_adopting_from_nowhere_is_refused(begun: State) -> None:
    ready = rft.refresh(begun)
    rollouts = sampled(ready)
    with refused(ready, BadInput, "source='memory'", "'engine' or 'first_step'"):
        _ = rft.adopt_logprobs(ready, rollouts, source=cast(Any, "memory"))


@pytest.mark.parametrize("lag", [1, 2])
def test_rollouts_older_than_max_lag_are_refused(begun: State, lag: int) -> None:
    state, rollouts = with_old(begun)
    for _ in range(lag):
        state = trained(state, rollouts)
    state = rft.finish_batch(state)
    for step in (rft.compute_old_logprobs, lambda s, *r, **k: rft.adopt_logprobs(s, *r, source="engine", **k)):
        with refused(state, TooStale, f"batch {rollouts.batch} was sampled from version 0, and the Actor is at {lag}", "max_lag"):
            _ = step(state, rollouts, max_lag=lag - 1)
    assert rft.compute_old_logprobs(state, rollouts, max_lag=lag).old.version == lag


def test_a_rank_without_prompts_has_nothing_that_is_too_old(begun: State) -> None:
    state, rollouts = with_old(begun)
    state = rft.broadcast(rft.finish_batch(trained(state, rollouts)))
    none = rft.generate(state, scripted_prompts(0), SAMPLING)
    assert (len(none), none.version) == (0, 1)
    assert rft.compute_old_logprobs(rft.sleep(state), none).old.version == 1


def test_stale_generation_is_refused_beyond_its_lag_and_carries_its_version(begun: State) -> None:
    state, rollouts = with_old(begun)
    state = trained(trained(state, rollouts), rollouts)
    with refused(state, TooStale, "the engine holds version 0, and the Actor is at 2", "state = broadcast(state)"):
        _ = rft.generate_stale(state, PROMPTS, SAMPLING, max_lag=1)
    with refused(state, BadInput, "max_lag must be at least 0"):
        _ = rft.generate_stale(state, PROMPTS, SAMPLING, max_lag=-1)
    assert rft.generate_stale(state, PROMPTS, SAMPLING, max_lag=2).version == 0


@pytest.mark.parametrize("count", [0, 2])
def test_batches_must_be_some_and_different(begun: State, count: int) -> None:
    ready = rft.refresh(begun)
    rollouts = sampled(ready)
    with refused(ready, *((WrongBatch, "given twice") if count else (BadInput, "at least one Rollouts"))):
        _ = rft.compute_old_logprobs(ready, *[rollouts] * count)
    with refused(ready, BadInput, "max_lag of at least 0"):
        _ = rft.compute_old_logprobs(ready, rollouts, max_lag=-1)


def test_what_are_no_rollouts_is_refused() -> None:
    given: Any = [rft.Rollouts]
    with scripted_launch(beside="own") as begun:
        taken: dict[str, Callable[[], object]] = {
            "compute_old_logprobs(state, *rollouts): each of rollouts": lambda: rft.compute_old_logprobs(begun, given),
            "adopt_logprobs(state, *rollouts): each of rollouts": lambda: rft.adopt_logprobs(begun, given, source="engine"),
            "reference_logprobs(state, rollouts, role=REFERENCE): rollouts": lambda: rft.reference_logprobs(begun, given),
            "values(state, rollouts): rollouts": lambda: rft.values(begun, given),
            "model_rewards(state, rollouts, reward_model('kind')): rollouts": lambda: rft.model_rewards(
                begun, given, rft.reward_model("kind")
            ),
            "rewards(state, rollouts, reward): rollouts": lambda: rft.rewards(begun, given, lambda _: 1.0),
        }
        for call, step in taken.items():
            with refused(begun, BadInput, f"{call} must be Rollouts, got list; generate(state, prompts, sampling) gives them"):
                _ = step()


def test_what_is_no_mini_batch_or_objective_is_refused(begun: State) -> None:
    state, rollouts = with_old(begun)
    with refused(state, BadInput, "minibatch must be Minibatch, got Rollouts", "`minibatches`, or `take`"):
        _ = rft.train_step(state, cast(Any, rollouts), OBJECTIVE)
    with refused(state, BadInput, "objective must be a function of (scores, micro-batch, totals), and grpo is none", "grpo(…)"):
        _ = rft.train_step(state, scripted_minibatch(rollouts), cast(Any, rft.grpo))
    with refused(state, BadInput, "supervised_step(state, minibatch): minibatch must be Minibatch, got Rollouts"):
        _ = rft.supervised_step(state, cast(Any, rollouts))
    with refused(state, BadInput, "objective must be a function", "got 'grpo'"):
        _ = rft.train_step(state, scripted_minibatch(rollouts), cast(Any, "grpo"))


@pytest.mark.parametrize(
    ("tokens", "says"),
    [(0, "has 0 tokens"), (254, "has 254 tokens; it needs at least 1, and with max_new_tokens=3 at most the engine's max_model_len=256")],
)
def test_a_prompt_that_is_empty_or_too_long_is_refused(begun: State, tokens: int, says: str) -> None:
    ready = rft.refresh(begun)
    prompts = rft.Prompts(
        tokens=torch.ones(1, 254, dtype=torch.int64),
        mask=torch.arange(254)[None] < tokens,
        ids=torch.tensor([0]),
        epoch=0,
        texts=("",),
        answers=("",),
    )
    with refused(ready, BadInput, "generate(state, …): prompt 0 of rank 0", says):
        _ = rft.generate(ready, prompts, SAMPLING)


@pytest.mark.parametrize(
    ("prompts", "sampling", "more", "says"),
    [
        ([1, 2], SAMPLING, {}, "prompts must be Prompts, got list"),
        (PROMPTS, {}, {}, "sampling must be Sampling, got dict; write Sampling"),
        (PROMPTS, SAMPLING, {"draw": "first"}, "draw must be an int, got 'first'"),
    ],
)
def test_what_is_no_prompts_or_sampling_is_refused(begun: State, prompts: Any, sampling: Any, more: Any, says: str) -> None:
    ready = rft.refresh(begun)
    with refused(ready, BadInput, "generate(state, prompts, sampling", says):
        _ = rft.generate(ready, prompts, sampling, **more)
    with refused(ready, BadInput, says):
        _ = rft.generate_stale(ready, prompts, sampling, max_lag=1, **more)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1.0], "got list"),
        ({"x": [None]}, "must be numbers"),
        ({"x": 1.0}, "must be numbers"),
        ({"x": [math.inf, 1.0, -math.inf]}, "the column 'x' has no mean"),
        ({"x": [1e308, 1e308]}, "the column 'x' has no mean"),
    ],
)
def test_what_has_no_mean_is_refused(begun: State, values: Any, says: str) -> None:
    with refused(begun, BadInput, "average(state, values)", says):
        _ = rft.average(begun, values)


@pytest.mark.parametrize("name", ["advantages", "logprobs", "reference"])
def test_what_is_not_finite_at_a_sampled_token_is_refused(begun: State, name: str) -> None:
    state, rollouts = with_old(begun)
    minibatch = scripted_minibatch(rollouts)
    values = torch.where(minibatch.sampled, torch.nan, 0.0)
    with refused(state, BadInput, "train_step(state, minibatch, objective)", f"{name} are not finite at sampled tokens of rows [0"):
        _ = rft.train_step(state, dc.replace(minibatch, **{name: values}), rft.grpo())
    elsewhere = torch.where(minibatch.sampled, 0.0, torch.nan)
    _ = rft.train_step(state, dc.replace(minibatch, **{name: elsewhere}), rft.grpo())


def test_rewards_that_are_not_finite_are_refused(begun: State) -> None:
    state, rollouts = with_old(begun)
    minibatch = scripted_minibatch(rollouts)
    rewards = torch.full(minibatch.rewards.shape, 0.5).index_fill(0, torch.tensor([1]), torch.nan)
    with refused(state, BadInput, "train_step(state, minibatch, objective)", "the rewards of rows [1] are not finite"):
        _ = rft.train_step(state, dc.replace(minibatch, rewards=rewards), rft.grpo())


def test_ranks_that_lose_each_other_in_an_engines_step_are_no_failure_of_the_engine(begun: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RanksDiverged("a rank is gone")

    monkeypatch.setattr(scripted_devices(begun).engine, "wake_weights", lost)
    with pytest.raises(RanksDiverged, match=r"^a rank is gone$"):
        _ = rft.broadcast(begun)
    for step in (rft.broadcast, rft.recover):
        with pytest.raises(RuntimePoisoned, match=r"a rank is gone\)\n  the ranks have lost each other.*start the job anew"):
            _ = step(begun)


def test_a_gradient_that_is_not_finite_leaves_the_state_living(begun: State) -> None:
    state, rollouts = with_old(begun)

    def step(*_: object) -> dict[str, float]:
        raise NonFiniteGradient("the gradient's norm is nan")

    scripted_devices(state).trainer.step = step
    with refused(state, NonFiniteGradient, "norm is nan"):
        _ = trained(state, rollouts)


# ---- roles and memory ----


@pytest.mark.parametrize(("step", "there", "other"), [(rft.offload, "host", "reload"), (rft.reload, "device", "offload")])
def test_a_role_that_is_there_already_is_refused(begun: State, step: Any, there: str, other: str) -> None:
    state = rft.offload(begun, rft.ACTOR_OPTIMIZER) if step is rft.offload else begun
    with refused(state, RoleError, f"{step.__name__}(state, ACTOR_OPTIMIZER): it is on the {there} already", f"{other} it first"):
        _ = step(state, rft.ACTOR_OPTIMIZER)


@pytest.mark.parametrize("step", [rft.offload, rft.reload])
def test_a_role_that_is_not_there_or_is_none_is_refused(begun: State, step: Any) -> None:
    with refused(begun, RoleError, "there is no role CRITIC", "it has ACTOR_OPTIMIZER"):
        _ = step(begun, rft.Role("critic"))
    with refused(begun, RoleError, "no role but an axis", f"state = {step.__name__}_actor(state)"):
        _ = step(begun, rft.Role("actor"))


def test_training_with_the_optimizer_on_the_host_is_refused(begun: State) -> None:
    state, rollouts = with_old(begun)
    state = rft.offload(state, rft.ACTOR_OPTIMIZER)
    with refused(state, RoleError, "train_step", "state = reload(state, ACTOR_OPTIMIZER)"):
        _ = trained(state, rollouts)
    with refused(state, RoleError, "supervised_step(state, minibatch)", "state = reload(state, ACTOR_OPTIMIZER)"):
        _ = rft.supervised_step(state, scripted_minibatch(rollouts))
    _ = trained(rft.reload(state, rft.ACTOR_OPTIMIZER), rollouts)


# The scripted device, in bytes: Actor 128, its optimizer 256, engine weights 64, cache 32, the weight stream 12.
FULL = [
    (459, lambda s: s, rft.broadcast, "broadcast(state)", ("sync bucket", "engine weights")),
    (479, rft.broadcast, rft.wake, "wake(state)", ("engine cache",)),
    (447, lambda s: rft.broadcast(rft.offload_actor(s)), rft.reload_actor, "reload_actor(state)", ("actor",)),
    (
        479,
        lambda s: rft.wake(rft.broadcast(rft.offload(s, rft.ACTOR_OPTIMIZER))),
        lambda s: rft.reload(s, rft.ACTOR_OPTIMIZER),
        "reload(state, ACTOR_OPTIMIZER)",
        ("actor_optimizer",),
    ),
]


@pytest.mark.parametrize(("limit", "before", "call", "named", "coming"), FULL, ids=[named for *_, named, _ in FULL])
def test_what_does_not_fit_is_refused_with_the_sum_and_one_byte_more_is_enough(
    limit: int, before: Callable[[State], State], call: Callable[[State], State], named: str, coming: tuple[str, ...]
) -> None:
    with scripted_launch(device_bytes=limit) as begun:
        state = before(begun)
        with refused(state, DoesNotFit, f"{named}: not enough device memory for", "rank 0", "nothing was moved") as caught:
            _ = call(state)
        message = str(caught.value)
        assert all(f"{part} (to come)" in message for part in coming)
        assert "would be on the device" in message
        assert "there, and free" in message
    with scripted_launch(device_bytes=limit + 1) as begun:
        _ = call(before(begun))


def test_the_table_of_a_refusal_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MIB", 1)
    with scripted_launch(device_bytes=479) as begun:
        state = rft.broadcast(begun)
        with refused(state, DoesNotFit) as caught:
            _ = rft.wake(state)
    cells = re.findall(r"│ (\S[^│]*?) +│ ([\d.]+) +│", str(caught.value))
    assert cells == [
        ("actor (there)", "128.0"),
        ("actor_optimizer (there)", "256.0"),
        ("engine weights (there)", "64.0"),
        ("engine cache (to come)", "32.0"),
        ("would be on the device", "480.0"),
        ("there, and free", "479.0"),
    ]


# ---- the models beside the Actor ----


def test_each_model_beside_the_actor_gives_its_own() -> None:
    kind = rft.reward_model("kind")
    with scripted_launch(beside="own") as begun:
        state = rft.refresh(begun)
        rollouts = sampled(state)
        for role in (rft.REFERENCE, rft.EMA, rft.CRITIC, rft.CRITIC_OPTIMIZER, kind):
            state = rft.reload(state, role)
        reference = rft.reference_logprobs(state, rollouts)
        assert torch.equal(reference, rollouts.logprobs), "the engine holds what the Reference holds, until something is trained"
        assert rft.model_rewards(state, rollouts, kind).valid.all()
        ones = torch.ones(rollouts.tokens.shape)
        batch = rft.experience(rollouts, torch.ones(len(rollouts)), ones, values=rft.values(state, rollouts), returns=ones)
        state, metrics = rft.train_critic(state, rft.take(batch, torch.arange(len(batch))), rft.critic_loss())
        assert metrics["loss"] >= 0
        assert (state.version, type(state.weights)) == (0, Fresh), "Actor and engine are not touched"
        state = rft.update_ema(state)
        assert torch.equal(rft.reference_logprobs(state, rollouts, role=rft.EMA), reference), "an average of equal weights"


def test_an_actor_without_an_adapter_exports_none(begun: State, tmp_path: Path) -> None:
    with refused(begun, BadInput, "this Actor has no adapter"):
        _ = rft.export_adapter(begun, tmp_path / "adapter")


# ---- the table ----

ANY, SAME = "any", "same"
DESIGN = {
    "launch": (None, "Asleep Stale OnDevice NoOld"),
    "broadcast": ("any any any any", "same Fresh same same"),
    "wake": ("Asleep Fresh any any", "Awake same same same"),
    "sleep": ("Awake any any any", "Asleep Stale same same"),
    "sleep_keeping": ("Awake any any any", "Asleep same same same"),
    "recover": ("any any any any", "Asleep Stale same same"),
    "generate": ("Awake Fresh any any", "same same same same"),
    "generate_stale": ("Awake any any any", "same same same same"),
    "offload_actor": ("any any OnDevice any", "same same Offloaded same"),
    "reload_actor": ("any any Offloaded any", "same same OnDevice same"),
    "offload": ("any any any any", "same same same same"),
    "reload": ("any any any any", "same same same same"),
    "compute_old_logprobs": ("any any OnDevice NoOld", "same same same OldLogProbs"),
    "adopt_logprobs": ("any any OnDevice NoOld", "same same same OldLogProbs"),
    "train_step": ("any any OnDevice OldLogProbs", "same Stale same same"),
    "supervised_step": ("any any OnDevice any", "same Stale same same"),
    "train_critic": ("any any any any", "same same same same"),
    "update_ema": ("any any any any", "same same same same"),
    "finish_batch": ("any any any OldLogProbs", "same same same NoOld"),
    "reference_logprobs": ("any any any any", "same same same same"),
    "values": ("any any any any", "same same same same"),
    "model_rewards": ("any any any any", "same same same same"),
    "save": ("any any any NoOld", "same same same same"),
    "restore": ("any any any any", "Asleep Stale OnDevice NoOld"),
    "rewards": ("any any any any", "same same same same"),
    "average": ("any any any any", "same same same same"),
    "all_rows": ("any any any any", "same same same same"),
    "over_ranks": ("any any any any", "same same same same"),
    "export": ("any any any any", "same same same same"),
    "export_adapter": ("any any any any", "same same same same"),
}
"""The design's table, written out: what each step needs of the four axes, and what it makes of them."""

ROWS = {edge.name: edge for edge in table.rows_of_the_library()}
JOINTS: list[Joint] = [cast(Joint, joint) for joint in itertools.product(*(both for _, both in AXES))]


def by_the_design(name: str, joint: Joint) -> Joint | None:
    """The axes after a step, by the table above; None where it may not be taken."""
    needs, gives = DESIGN[name]
    types = {kind.__name__: kind for _, both in AXES for kind in both}
    if needs is None or any(word not in (ANY, axis.__name__) for word, axis in zip(needs.split(), joint, strict=True)):
        return None
    return cast(Joint, tuple(axis if word == SAME else types[word] for word, axis in zip(gives.split(), joint, strict=True)))


def test_the_table_has_the_designs_rows() -> None:
    assert list(ROWS) == list(DESIGN)
    assert {name for name, edge in ROWS.items() if edge.kind == "recovery"} == {"recover"}
    assert {name for name, edge in ROWS.items() if edge.kind == "restoration"} == {"restore"}
    kept = {name for name, (needs, gives) in DESIGN.items() if needs and set(gives.split()) == {SAME}}
    assert {name for name, edge in ROWS.items() if edge.kind == "observation"} == kept - {"offload", "reload", "train_critic", "update_ema"}


@pytest.mark.parametrize("edge", ROWS.values(), ids=ROWS.keys())
def test_each_row_is_the_designs_in_all_joint_states(edge: Edge) -> None:
    if edge.kind == "beginning":
        assert [axis.__name__ for axis in edge.after if axis] == DESIGN[edge.name][1].split()
        return
    for joint in JOINTS:
        assert (edge.apply(joint) if edge.allows(joint) else None) == by_the_design(edge.name, joint)


def test_every_reachable_state_leads_on_to_a_fresh_batch() -> None:
    start = cast(Joint, ROWS["launch"].after)
    goal: Joint = (Awake, Fresh, OnDevice, NoOld)
    found = table.reachable(list(ROWS.values()), start)
    assert set(found) == set(JOINTS), "every joint state of the axes is reachable"
    for joint in found:
        assert goal in table.reachable(list(ROWS.values()), joint)
        steps = found[joint]
        assert {edge.name for edge in steps} == {
            edge.name
            for edge in ROWS.values()
            if edge.kind in ("transition", "recovery", "restoration") and by_the_design(edge.name, joint) is not None
        }


def test_from_every_state_the_loop_goes_on_in_at_most_four_steps_on_the_devices_too() -> None:
    for path in _paths(ROWS["launch"].after):
        with scripted_launch() as begun:
            state = _walked(begun, path)
            if type(state.actor) is not OnDevice:
                state = rft.reload_actor(state)
            if type(state.old) is OldLogProbs:
                state = rft.finish_batch(state)
            if type(state.weights) is not Fresh:
                state = rft.broadcast(state)
            if type(state.engine) is not Awake:
                state = rft.wake(state)
            assert len(sampled(state)) == 4


def _paths(start: Any) -> list[list[Edge]]:
    """For every reachable joint state, a shortest way there."""
    paths: dict[Joint, list[Edge]] = {start: []}
    waiting = [start]
    for here in waiting:
        for edge in table.reachable(list(ROWS.values()), here)[here]:
            if edge.apply(here) not in paths:
                paths[edge.apply(here)] = [*paths[here], edge]
                waiting.append(edge.apply(here))
    assert len(paths) == len(JOINTS)
    return list(paths.values())


def _walked(state: State, path: list[Edge]) -> State:
    for edge in path:
        state = {
            "compute_old_logprobs": lambda s: rft.compute_old_logprobs(s, FOREIGN),
            "train_step": lambda s: trained(s, FOREIGN),
            "supervised_step": lambda s: rft.supervised_step(s, MINIBATCH)[0],
        }.get(edge.name, getattr(rft, edge.name))(state)
        assert edge.name in ROWS
    return state


# ---- printing ----


@pytest.fixture(scope="module")
def printed() -> str:
    run = [sys.executable, "-m", "rft.steps"]
    return subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}).stdout


def test_it_prints_inside_a_process_too(printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    _ = runpy.run_module("rft.steps.__main__")
    assert capsys.readouterr().out == printed


def test_the_table_prints_every_step_as_a_row(printed: str) -> None:
    text, _, _ = printed.partition("\n\n")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [re.findall("`(.+?)`", row)[0] for row in rows] == list(DESIGN)
    assert "| `train_step` | [any, any, OnDevice, OldLogProbs] | [same, Stale, OnDevice, OldLogProbs] and metrics |" in rows
    assert "| `generate` | [Awake, Fresh, any, any] | a value |" in rows
    assert "| `launch` | – | [Asleep, Stale, OnDevice, NoOld] |" in rows


def test_the_diagram_is_a_state_diagram_of_the_four_axes(printed: str) -> None:
    _, _, diagram = printed.partition("```mermaid\n")
    first, *lines, end = diagram.strip().splitlines()
    assert (first, end) == ("stateDiagram-v2", "```")
    found, inside = dict[str, set[str]](), ""
    for line in map(str.strip, lines):
        if opening := re.fullmatch(r"state (\w+) \{", line):
            inside = opening[1]
            found[inside] = set()
        elif line == "}":
            inside = ""
        else:
            assert inside
            arrow = re.fullmatch(r"(\[\*\]|\w+) --> (\w+): \w+", line)
            note = re.fullmatch(r"note right of (\w+): needed by \w+(, \w+)*", line)
            assert arrow or note, line
            found[inside] |= set(arrow.groups() if arrow else [cast(re.Match[str], note)[1]]) - {"[*]"}
    assert found == {name: {kind.__name__ for kind in both} for name, both in AXES}


def test_the_readme_shows_what_is_printed(printed: str) -> None:
    shown = re.search(r"<!-- steps -->\n(.*?)<!-- /steps -->", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1].strip() == printed.strip()


# ---- checkpoints: what they hold, and what goes wrong with them, is in tests/checkpoint ----


@pytest.fixture
def saved(begun: State, tmp_path: Path) -> State:
    """A state of version 1 that has been saved, with the engine awake and the optimizer on the host since."""
    state = rft.finish_batch(trained(*with_old(begun)))
    path = save(state, tmp_path, {"step": 1})
    assert path.parent == tmp_path
    return rft.offload(rft.broadcast(state), rft.ACTOR_OPTIMIZER)


def test_restoring_gives_back_the_saved_version_and_values_at_rest(saved: State, tmp_path: Path) -> None:
    rollouts = sampled(saved)
    state = rft.reload(rft.compute_old_logprobs(saved, rollouts), rft.ACTOR_OPTIMIZER)
    state = rft.offload_actor(trained(state, rollouts))
    again, run = restore(state, tmp_path, {"step": 0})
    assert run == {"step": 1}
    assert joint_of(again) == (rft.Asleep, rft.Stale, OnDevice, NoOld)
    assert (again.version, again.generation) == (1, state.generation + 1)
    devices = scripted_devices(again)
    assert devices.trainer.weights["head"].tolist() == [1.0]
    assert devices.trainer.on_device == {"model": True, "optimizer": True}
    assert devices.engine is not None
    assert devices.engine.weights is None
    assert len(sampled(rft.refresh(again))) == 4


def test_restoring_from_a_used_up_state_puts_roles_where_it_had_them(saved: State, tmp_path: Path) -> None:
    _ = rft.reload(saved, rft.ACTOR_OPTIMIZER)
    again, _ = restore(saved, tmp_path, {"step": 0})
    assert again.roles.of(rft.ACTOR_OPTIMIZER).where == "host"
    assert not scripted_devices(again).trainer.on_device["optimizer"]


def test_restoring_leads_on_after_any_failure(saved: State, tmp_path: Path) -> None:
    state = rft.reload(saved, rft.ACTOR_OPTIMIZER)
    rollouts = sampled(state)
    batch = rft.compute_old_logprobs(state, rollouts)
    with failing(batch, "step"), pytest.raises(RuntimePoisoned):
        _ = trained(batch, rollouts)
    again, _ = restore(batch, tmp_path, {"step": 0})
    with failing(again, "load"), pytest.raises(EngineFailed):
        _ = rft.broadcast(again)
    final, _ = restore(again, tmp_path, {"step": 0})
    assert rft.legal(rft.refresh(final))


def test_a_restore_that_fails_half_way_can_be_tried_again(saved: State, tmp_path: Path) -> None:
    with failing(saved, "install"), pytest.raises(RuntimePoisoned):
        _ = restore(saved, tmp_path, {"step": 0})
    assert rft.legal(saved) == ("restore",)
    assert restore(saved, tmp_path, {"step": 0})[0].version == 1


def test_saving_in_the_middle_of_a_batch_is_refused(begun: State, tmp_path: Path) -> None:
    state, _ = with_old(begun)
    with refused(state, IllegalStep, "old is OldLogProbs, and must be NoOld", "state = finish_batch(state)"):
        _ = save(cast(Any, state), tmp_path, None)


def test_restoring_nothing_is_refused(begun: State, tmp_path: Path) -> None:
    with refused(begun, BadInput, "there is no whole checkpoint in"):
        _ = restore(begun, tmp_path / "nowhere", None)


# ---- launching and exporting ----


@dc.dataclass(frozen=True)
class ScriptedEngineSpec:
    """An engine of one's own, given to the real `launch`."""

    built: list[str]
    fails: bool = False

    def build(self, *_: object) -> ScriptedEngine:
        if self.fails:
            raise rft.MissingEngine("install it by hand")
        self.built.append("engine")
        engine = ScriptedEngine(Faults())
        engine.close = lambda: self.built.append("engine closed")
        return engine


@dc.dataclass(frozen=True)
class ScriptedTrainerSpec:
    """A trainer of one's own."""

    built: list[str]

    def build(self, *_: object) -> ScriptedTrainer:
        self.built.append("trainer")
        trainer = ScriptedTrainer(Faults())
        trainer.close = lambda: self.built.append("trainer closed")
        return trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


def test_launch_opens_the_engine_first_and_gives_everything_back(model: str) -> None:
    built = list[str]()
    spec = rft.LaunchSpec(model=model, engine=ScriptedEngineSpec(built), trainer=ScriptedTrainerSpec(built))
    with contextlib.suppress(ZeroDivisionError), rft.launch(spec) as state:
        assert rft.describe(state) == "RuntimeState[Asleep, Stale, OnDevice, NoOld] (version 0, generation 0)"
        assert len(sampled(rft.refresh(state))) == 4
        assert built == ["engine", "trainer"]
        raise ZeroDivisionError
    assert built == ["engine", "trainer", "trainer closed", "engine closed"]
    assert not torch.distributed.is_initialized()
    with pytest.raises(RuntimeClosed):
        _ = rft.broadcast(state)


def test_launch_without_an_engine_trains_under_supervision(model: str) -> None:
    with rft.launch(rft.LaunchSpec(model=model, engine=None, trainer=ScriptedTrainerSpec([]))) as begun:
        state, metrics = rft.supervised_step(begun, MINIBATCH)
        assert joint_of(state) == joint_of(begun)
        assert state.version == 1
        assert metrics["loss"] > 0
        assert "broadcast" not in rft.legal(state)


def test_a_launch_that_fails_gives_back_what_it_had(model: str) -> None:
    built = list[str]()
    spec = rft.LaunchSpec(model=model, engine=ScriptedEngineSpec(built, fails=True), trainer=ScriptedTrainerSpec(built))
    with pytest.raises(rft.MissingEngine, match="by hand"), rft.launch(spec):
        pass
    assert built == []
    assert not torch.distributed.is_initialized()


def test_export_writes_a_folder_and_never_over_a_file(begun: State, tmp_path: Path) -> None:
    assert rft.export(begun, tmp_path / "model") == tmp_path / "model"
    assert (tmp_path / "model").is_dir()
    (tmp_path / "file").touch()
    with refused(begun, BadInput, "there is a file of that name"):
        _ = rft.export(begun, tmp_path / "file")
    with refused(begun, BadInput, "path names no folder", "File name too long"):
        _ = rft.export(begun, tmp_path / ("x" * 300))

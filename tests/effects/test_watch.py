import dataclasses as dc
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch

import rft
from rft.effects.runtime import runtime_of
from rft.effects.watch import FACTOR, LENGTH, MEMORY, TOLERANCE, Watch
from rft.engines.scripted import scripted_logprob
from rft.state import PolicyVersion
from rft.testing import scripted_devices, scripted_launch, scripted_minibatch
from tests.refusals import State, sampled

FP32 = TOLERANCE[torch.float32]
NOW = PolicyVersion(3)


@pytest.fixture
def begun() -> Iterator[State]:
    with scripted_launch() as state:
        yield state


class OffBy:
    """An engine and an Actor in one, whose log-probs of the probe differ by a given number."""

    dtype = torch.float32

    def __init__(self, gap: float, max_model_len: int = 64) -> None:
        self.gap, self.max_model_len, self.asked = gap, max_model_len, 0

    def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
        self.asked += 1
        assert all(len(tokens) < self.max_model_len for tokens in sequences)
        return [[-1.0 - self.gap] * (len(tokens) - 1) for tokens in sequences]

    def logprobs(self, tokens: torch.Tensor, mask: torch.Tensor, wanted: torch.Tensor, temperature: float) -> torch.Tensor:
        assert bool(mask.all())
        assert wanted.tolist() == [[False, *[True] * (tokens.shape[1] - 1)]]
        assert temperature == 1.0
        return torch.full(tokens.shape, -1.0)


def watch(every: int = 1) -> Watch:
    with scripted_launch() as state:
        return Watch(every, runtime_of(state).model)


def look(watching: Watch, gap: float, version: PolicyVersion = NOW, *, actor_at: PolicyVersion = NOW) -> rft.Gap | None:
    """One wake and what the watch says of it."""
    both, before = cast(Any, OffBy(gap)), len(watching.gaps)
    watching.ask_engine(both, version)
    watching.ask_actor(both, actor_at, "wake")
    return watching.gaps[-1] if len(watching.gaps) > before else None


# ---- what is an alarm ----


@pytest.mark.parametrize(("gap", "alarming"), [(0.0, False), (FP32 * 0.9, False), (FP32 * 1.1, True), (math.nan, True), (math.inf, True)])
def test_a_gap_above_the_tolerance_is_an_alarm_that_names_the_last_transition(
    gap: float, alarming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rft"):
        seen = look(watch(), gap)
    assert seen is not None
    assert (seen.alarm is not None) is alarming
    assert len(caplog.records) == int(alarming)
    if seen.alarm:
        assert "after wake (version 3)" in seen.alarm


def test_the_probe_is_no_longer_than_the_engine_takes() -> None:
    watching, short = watch(), cast(Any, OffBy(0.0, max_model_len=20))
    watching.ask_engine(short, NOW)
    watching.ask_actor(short, NOW, "wake")
    assert [gap.mean for gap in watching.gaps] == [0.0]


def test_what_is_usual_is_that_of_the_coarser_of_engine_and_actor() -> None:
    """An engine in fp32 differs from an Actor that computes in bf16 as much as one in bf16 does."""

    class Rough(OffBy):
        dtype = torch.bfloat16

    watching, rough = watch(), TOLERANCE[torch.bfloat16]
    for gap, alarming in ((rough * 0.9, False), (rough * 1.1, True)):
        watching.ask_engine(cast(Any, OffBy(gap)), NOW)
        watching.ask_actor(cast(Any, Rough(gap)), NOW, "wake")
        assert (watching.gaps[-1].alarm is not None) is alarming


def test_a_gap_far_above_what_is_usual_is_an_alarm_below_the_tolerance_too() -> None:
    watching = watch()
    usual = FP32 / 50
    for _ in range(MEMORY):
        seen = look(watching, usual)
        assert seen is not None
        assert seen.alarm is None
    calm, loud = look(watching, usual * FACTOR * 0.9), look(watching, usual * FACTOR * 1.1)
    assert calm is not None
    assert calm.alarm is None
    assert loud is not None
    assert loud.alarm is not None


def test_what_is_usual_is_never_so_small_that_noise_is_an_alarm() -> None:
    watching = watch()
    for _ in range(MEMORY):
        _ = look(watching, 0.0)
    seen = look(watching, FP32 / 150)
    assert seen is not None
    assert seen.alarm is None


def test_single_tokens_may_differ_more_than_the_mean_and_the_largest_is_told() -> None:
    class OneOff(OffBy):
        def score(self, sequences: Sequence[tuple[int, ...]]) -> list[list[float]]:
            return [[-1.0] * (len(tokens) - 2) + [-1.0 - self.gap] for tokens in sequences]

    watching, one = watch(), cast(Any, OneOff(FP32 * 10))
    watching.ask_engine(one, NOW)
    watching.ask_actor(one, NOW, "wake")
    (gap,) = watching.gaps
    assert gap.alarm is None
    assert gap.largest == pytest.approx(FP32 * 10, rel=1e-3)
    assert gap.mean == pytest.approx(FP32 * 10 / (LENGTH - 1), rel=1e-3)


def test_a_gap_that_is_no_number_does_not_spoil_what_is_usual() -> None:
    watching = watch()
    for gap in [FP32 / 50] * MEMORY + [math.nan] * MEMORY:
        _ = look(watching, gap)
    seen = look(watching, FP32 / 2)
    assert seen is not None
    assert seen.alarm is not None


# ---- when it looks ----


@pytest.mark.parametrize(("every", "looks"), [(0, 0), (1, 6), (2, 3), (4, 1)])
def test_it_looks_after_every_so_many_wakes(every: int, looks: int) -> None:
    watching = watch(every)
    for _ in range(6):
        _ = look(watching, 0.0)
    assert len(watching.gaps) == looks


def test_a_jump_on_what_was_sampled_is_an_alarm_however_far_apart_they_usually_are(caplog: pytest.LogCaptureFixture) -> None:
    """Top-p sampling alone may keep them apart by more than any tolerance."""
    watching = watch()
    for gap in [0.3] * MEMORY + [0.4, 1.3, math.nan]:
        watching.see_rollouts(gap, 2 * gap, "broadcast", NOW, torch.float32)
    *usual, jump, nothing = watching.gaps
    assert {(gap.of, gap.alarm) for gap in usual} == {("rollouts", None)}
    assert (jump.mean, jump.largest) == (1.3, 2.6)
    assert jump.alarm == "engine and Actor differ by 1.3 nats on sampled tokens after broadcast (version 3); at most 1.2 is usual"
    assert nothing.alarm is not None
    assert [record.getMessage() for record in caplog.records] == [jump.alarm, nothing.alarm]


def test_probe_and_rollouts_are_judged_apart_and_remembered() -> None:
    watching, later = watch(), watch()
    for _ in range(MEMORY):
        watching.see_rollouts(0.3, 0.3, "wake", NOW, torch.float32)
        assert look(watching, FP32 / 1000) is not None
    later.remember(watching.memory())
    seen = look(later, FP32 / 50)
    assert seen is not None
    assert seen.alarm is not None
    later.see_rollouts(0.31, 0.31, "wake", NOW, torch.float32)
    assert later.gaps[-1].alarm is None


def test_scores_of_another_version_are_dropped() -> None:
    watching = watch()
    assert look(watching, 1.0, actor_at=PolicyVersion(4)) is None
    watching.ask_actor(cast(Any, OffBy(1.0)), NOW, "reload_actor")
    assert not watching.gaps


def test_the_probe_is_short_and_fixed(begun: State) -> None:
    state = rft.refresh(begun)
    engine = scripted_devices(state).engine
    assert engine is not None
    assert max(map(len, engine.prefixes)) == LENGTH - 1  # what comes before the last token


# ---- in the steps ----


def test_an_update_that_was_held_back_is_an_alarm_at_wake(begun: State) -> None:
    state = rft.broadcast(begun)
    engine = scripted_devices(state).engine
    assert engine is not None
    assert engine.weights is not None
    engine.weights = {name: tensor - 1 for name, tensor in engine.weights.items()}
    state = rft.wake(state)
    (gap,) = rft.health(state).gaps
    ids = watch()._probe
    apart = [abs(scripted_logprob(-3.0, ids[:end]) - scripted_logprob(0.0, ids[:end])) for end in range(2, len(ids) + 1)]
    assert gap.mean == pytest.approx(sum(apart) / len(apart))
    assert gap.alarm is not None
    assert "after wake (version 0)" in gap.alarm


def test_where_the_actor_is_away_at_wake_it_is_compared_at_reload(begun: State) -> None:
    state = rft.wake(rft.offload_actor(rft.broadcast(begun)))
    assert rft.health(state).gaps == ()
    scripted_devices(state).trainer.weights["head"] += 5
    state = rft.reload_actor(state)
    (gap,) = rft.health(state).gaps
    assert gap.alarm is not None
    assert "after reload_actor (version 0)" in gap.alarm


def test_a_loop_that_never_sleeps_is_watched_at_its_broadcasts(begun: State) -> None:
    state = rft.refresh(begun)
    state, _ = rft.supervised_step(state, scripted_minibatch(sampled(state)))
    state = rft.broadcast(state)
    assert [gap.version for gap in rft.health(state).gaps] == [0, 1]
    assert all(gap.alarm is None for gap in rft.health(state).gaps)


def test_no_prefix_of_older_weights_reaches_the_probe(begun: State) -> None:
    state = rft.refresh(begun)
    engine = scripted_devices(state).engine
    assert engine is not None
    engine.flush = lambda: None
    state, _ = rft.supervised_step(state, scripted_minibatch(sampled(state)))
    state = rft.broadcast(state)
    gap = rft.health(state).gaps[-1]
    assert gap.alarm is not None
    assert "after broadcast (version 1)" in gap.alarm


# ---- what was sampled ----


def shifted(rollouts: rft.Rollouts, by: float) -> rft.Rollouts:
    """As if the engine had sampled with other log-probs than the Actor's."""
    return dc.replace(rollouts, logprobs=torch.where(rollouts.sampled, rollouts.logprobs + by, 0.0))


@pytest.mark.parametrize("source", ["actor", "first_step", "engine"])
def test_a_step_tells_how_far_engine_and_trainer_are_apart(begun: State, source: Any) -> None:
    ready = rft.refresh(begun)
    rollouts = shifted(sampled(ready), 0.25)
    state = rft.compute_old_logprobs(ready, rollouts) if source == "actor" else rft.adopt_logprobs(ready, rollouts, source=source)
    state, metrics = rft.train_step(state, scripted_minibatch(rollouts), rft.grpo())
    assert metrics["engine_gap"] == pytest.approx(0.25)
    assert metrics["engine_gap_max"] == pytest.approx(0.25)
    assert metrics["engine_gap_p50"] == pytest.approx(0.25, rel=0.015)
    assert metrics["engine_ratio_outside"] == 1.0
    seen = rft.health(state).gaps[-1]
    assert (seen.of, seen.version, seen.alarm) == ("rollouts", NOW - NOW, None)
    assert seen.mean == metrics["engine_gap"]
    if source == "engine":
        _, metrics = rft.train_step(state, scripted_minibatch(rollouts), rft.grpo())
        assert "engine_gap" not in metrics, "the old log-probs are the engine's, and the new ones of another Actor"


def test_what_older_weights_sampled_is_reported_and_no_alarm(begun: State) -> None:
    ready = rft.refresh(begun)
    old, new = shifted(sampled(ready), 5.0), sampled(ready)
    state, _ = rft.train_step(rft.compute_old_logprobs(ready, new), scripted_minibatch(new), rft.grpo())
    state = rft.compute_old_logprobs(rft.finish_batch(state), old, max_lag=1)
    seen = len(rft.health(state).gaps)
    state, metrics = rft.train_step(state, scripted_minibatch(old), rft.grpo())
    assert metrics["engine_gap"] > 1
    assert len(rft.health(state).gaps) == seen


def test_an_alarm_names_what_the_engine_did_before_it_sampled(begun: State, caplog: pytest.LogCaptureFixture) -> None:
    state = begun
    for round in range(MEMORY + 1):
        ready = rft.wake(rft.broadcast(state))
        rollouts = shifted(sampled(ready), 1.0 if round == MEMORY else 0.01)
        scored = rft.compute_old_logprobs(rft.sleep(ready), rollouts)
        state, _ = rft.train_step(scored, scripted_minibatch(rollouts), rft.grpo())
        state = rft.finish_batch(state)
    assert "nats on sampled tokens after wake (version 16)" in caplog.text

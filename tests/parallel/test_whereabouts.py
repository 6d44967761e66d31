"""When a rank must end itself, by a clock of the test's own; and that a rank which works is left alone, however long a step takes."""

import os
import threading
import time

import pytest
from torch.distributed import DistNetworkError

from rft.errors import BadInput, EngineFailed, RanksDiverged, RuntimePoisoned
from rft.parallel import whereabouts
from rft.parallel.whereabouts import Whereabouts, lost_others

DEADLINE_S = 60.0
GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


class Clock:
    """A clock that the test puts forward."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def rank(*, spins: bool = False) -> tuple[Whereabouts, Clock]:
    clock = Clock()
    return Whereabouts(DEADLINE_S, spins=spins, clock=clock), clock


def ends_after(here: Whereabouts, clock: Clock, seconds: float, every: float = 0.25) -> str | None:
    """Looks at a rank for so long; gives why it must end, if it must."""
    looks = int(seconds / every)
    for _ in range(looks):
        clock.now += every
        if why := here.overdue():
            return why
    return None


def begin(here: Whereabouts, step: str) -> None:
    here.comes(step)
    here.enters()


# ---- inside a step ----


@pytest.mark.parametrize("spins", [True, False])
def test_one_call_that_lasts_longer_than_the_deadline_ends_the_rank(spins: bool) -> None:
    here, clock = rank(spins=spins)
    begin(here, "train_step (generation 4)")
    began = clock.now
    why = ends_after(here, clock, 2 * DEADLINE_S)
    assert why == "it was in one call of train_step (generation 4) for longer than the deadline of 60 s"
    assert DEADLINE_S < clock.now - began < DEADLINE_S + 2


def test_a_long_step_that_goes_from_call_to_call_is_left_alone() -> None:
    here, clock = rank(spins=True)
    begin(here, "train_step (generation 4)")
    for _ in range(10):
        assert ends_after(here, clock, DEADLINE_S / 2) is None
        assert ends_after(here, clock, 1) is None  # another line


def test_a_long_call_that_computes_is_left_alone_on_a_cpu_but_on_a_gpu_it_may_be_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for spins in (False, True):
        here, clock = rank(spins=spins)
        monkeypatch.setattr(whereabouts, "_computed", lambda _, clock=clock: 0.9 * clock.now)
        begin(here, "train_step (generation 4)")
        assert bool(ends_after(here, clock, 2 * DEADLINE_S)) is spins


def test_what_a_thread_has_computed_is_its_own() -> None:
    before = whereabouts._computed(threading.get_ident())
    time.sleep(0.05)
    slept = whereabouts._computed(threading.get_ident())
    _ = sum(range(3_000_000))
    assert slept - before < 0.02 < whereabouts._computed(threading.get_ident()) - slept


@pytest.mark.parametrize("step", sorted(whereabouts.OWN_PACE))
def test_a_step_at_its_own_pace_may_wait_for_something_else_once_all_have_come(step: str) -> None:
    here, clock = rank()
    here.comes(f"{step} (generation 4)")
    assert ends_after(here, clock, DEADLINE_S + 2)
    begin(here, f"{step} (generation 4)")
    assert ends_after(here, clock, 10 * DEADLINE_S, every=5) is None


def test_between_steps_and_before_the_first_a_rank_takes_as_long_as_it_likes() -> None:
    here, clock = rank()
    assert ends_after(here, clock, 10 * DEADLINE_S, every=5) is None
    begin(here, "train_step (generation 4)")
    here.leaves()
    assert ends_after(here, clock, 10 * DEADLINE_S, every=5) is None


# ---- after a failure ----


@pytest.mark.parametrize("error", [RuntimePoisoned("half-way"), ValueError("of an objective")])
def test_a_rank_that_failed_meets_the_others_or_leaves_before_the_deadline(error: Exception) -> None:
    here, clock = rank()
    begin(here, "train_step (generation 4)")
    here.fails(error)
    assert ends_after(here, clock, DEADLINE_S - 1) is None
    begin(here, "restore (generation 4)")
    here.leaves()
    assert ends_after(here, clock, 2 * DEADLINE_S, every=5) is None, "they met"
    here.fails(error)
    why = ends_after(here, clock, 2 * DEADLINE_S, every=5)
    assert why == "it failed in restore (generation 4), and has neither met the others nor left `launch` since"


@pytest.mark.parametrize("error", [BadInput("refused"), EngineFailed("poisoned, on all ranks")])
def test_what_all_ranks_are_told_alike_sets_no_limit(error: Exception) -> None:
    here, clock = rank()
    begin(here, "generate (generation 4)")
    here.fails(error)
    assert ends_after(here, clock, 10 * DEADLINE_S, every=5) is None


def test_a_rank_that_was_given_up_has_a_short_grace_and_no_failure_makes_it_longer() -> None:
    here, clock = rank()
    begin(here, "train_step (generation 4)")
    here.given_up("rank 1 did not come")
    here.fails(RuntimePoisoned("half-way"))
    here.closes(RuntimePoisoned("half-way"))
    assert ends_after(here, clock, whereabouts.GRACE_S) is None
    assert ends_after(here, clock, 0.5) == "it has not left `launch` since: rank 1 did not come"


def test_a_rank_that_cannot_leave_after_an_error_ends_at_the_deadline() -> None:
    here, clock = rank()
    here.closes(None)
    assert ends_after(here, clock, 2 * DEADLINE_S, every=5) is None
    here.closes(ValueError("of the loop"))
    assert ends_after(here, clock, 2 * DEADLINE_S, every=5) == "it could not leave `launch`"


def test_a_rank_whose_parent_has_ended_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = rank()
    assert here.overdue() is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert here.overdue() == "what started this rank, torchrun as a rule, has ended"


# ---- what it says ----


def test_it_says_where_it_is_for_how_long_and_why_it_failed() -> None:
    here, clock = rank()
    assert here.step == "launch"
    here.comes("broadcast (generation 1)")
    clock.now += 7
    assert here.doing() == "waits there for the others for 7 s"
    here.enters()
    assert here.doing() == "in it for 0 s"
    try:
        raise RuntimePoisoned("a step failed half-way") from ValueError("two\nlines")
    except RuntimePoisoned as error:
        here.fails(error)
    clock.now += 2
    assert here.doing() == "failed in it (ValueError: two) for 2 s"
    here.closes(None)
    assert here.doing() == "leaving `launch` for 0 s"


def test_what_says_that_the_others_cannot_be_reached() -> None:
    wrapped = RuntimePoisoned("half-way")
    wrapped.__cause__ = GLOO
    for error in (GLOO, wrapped, DistNetworkError("Broken pipe"), RuntimeError("Application timeout caused pair closure")):
        assert lost_others(error)
    for error in (RuntimeError("shapes differ"), RanksDiverged("not at the same step"), ValueError("gloo"), None):
        assert not lost_others(error)

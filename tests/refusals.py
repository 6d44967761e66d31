"""Calls that must be refused and change nothing, on the scripted runtime; and short ways to the states that they start from."""

import contextlib
from collections.abc import Generator
from typing import Any

import pytest

import rft
from rft.testing import SAMPLING, scripted_devices, scripted_minibatch, scripted_prompts, scripted_snapshot

State = rft.RuntimeState[Any, Any, Any, Any]


@contextlib.contextmanager
def refused(living: State, error: type[rft.RftError], *says: str) -> Generator[pytest.ExceptionInfo[Exception]]:
    """Inside, exactly `error` is raised, its message has each of `says`, no device is touched, and `living` goes on living."""
    before = scripted_snapshot(living)
    with pytest.raises(rft.RftError) as caught:
        yield caught
    assert type(caught.value) is error, caught.value
    for words in says:
        assert words in str(caught.value)
    assert scripted_snapshot(living) == before
    assert living.devices.ledger.living() is living
    assert rft.legal(living)


def sampled(ready: State) -> rft.Rollouts:
    """Rollouts of a state that is awake and fresh."""
    return rft.generate(ready, scripted_prompts(), SAMPLING)


def with_old(state: State) -> tuple[State, rft.Rollouts]:
    """[Awake, Fresh, OnDevice, OldLogProbs] from launch's state, and the batch in hand."""
    ready = rft.refresh(state)
    rollouts = sampled(ready)
    return rft.compute_old_logprobs(ready, rollouts), rollouts


def trained(state: State, rollouts: rft.Rollouts) -> State:
    """One `train_step` on the batch in hand."""
    return rft.train_step(state, scripted_minibatch(rollouts), rft.grpo())[0]


@contextlib.contextmanager
def failing(state: State, verb: str) -> Generator[None]:
    """Makes a scripted verb fail."""
    scripted_devices(state).faults.arm(verb)
    try:
        yield
    finally:
        scripted_devices(state).faults.arm(None)

"""Compositions of steps, a few lines each: to be used, and to be read before writing your own.

They know nothing that a user's function could not know; none is a step.
"""

import dataclasses as dc

from rft.data.minibatches import Cut, minibatches
from rft.errors import IllegalStep
from rft.experience import Experience, Prompts, Rollouts, Sampling
from rft.objectives import Objective
from rft.rewards.scoring import RewardFunction, Rewards
from rft.state import A, Asleep, Awake, E, Fresh, NoOld, O, OldLogProbs, OnDevice, RuntimeState, Stale
from rft.steps import Metrics, average, broadcast, finish_batch, generate, rewards, train_step, wake


def refresh(state: RuntimeState[Asleep, Fresh | Stale, A, O], /) -> RuntimeState[Awake, Fresh, A, O]:
    """Broadcast, then wake: the engine generates from the current weights. An engine that is awake is refused before either."""
    if type(state.engine) is not Asleep:
        raise IllegalStep("refresh(state) is broadcast and wake, and the engine is awake; write instead: state = broadcast(state)")
    return wake(broadcast(state))


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Collected:
    """Rollouts and their rewards, row by row."""

    rollouts: Rollouts
    rewards: Rewards


def collect(
    state: RuntimeState[Awake, Fresh, A, O], prompts: Prompts, sampling: Sampling, reward: RewardFunction, /, *, draw: int = 0
) -> Collected:
    """Generate and score; the state lives on."""
    rollouts = generate(state, prompts, sampling, draw=draw)
    return Collected(rollouts=rollouts, rewards=rewards(state, rollouts, reward))


def update(
    state: RuntimeState[E, Fresh | Stale, OnDevice, OldLogProbs], experience: Experience, objective: Objective, cut: Cut, /
) -> tuple[RuntimeState[E, Stale, OnDevice, NoOld], list[Metrics]]:
    """One `train_step` per mini-batch of `cut`, then `finish_batch`; the metrics of each step, in order."""
    first, *others = minibatches(experience, cut)
    trained, metrics = train_step(state, first, objective)
    history = [metrics]
    for minibatch in others:
        trained, metrics = train_step(trained, minibatch, objective)
        history.append(metrics)
    return finish_batch(trained), history


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What `evaluate` saw: the mean reward and length over all ranks, and this rank's own rows."""

    reward: float
    length: float
    collected: Collected


def evaluate(state: RuntimeState[Awake, Fresh, A, O], prompts: Prompts, sampling: Sampling, reward: RewardFunction, /) -> Evaluation:
    """Mean reward by the same generation and reward path as training; trains on nothing and moves nothing."""
    collected = collect(state, prompts, sampling, reward)
    scored = collected.rewards
    means = average(state, {"reward": scored.values[scored.valid].tolist(), "length": collected.rollouts.sampled.sum(1).tolist()})
    return Evaluation(reward=means["reward"], length=means["length"], collected=collected)

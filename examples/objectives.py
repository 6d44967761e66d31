"""The usual algorithms, each as a composition of a few lines: how advantages are estimated, and what is minimised.

Copy the one you want and change it. Formulas, papers and the names that other systems use are in docs/algorithms.md. What is written
below is each paper's own setting where it names one; none has a penalty on the KL to a reference: add
`rft.combined(…, rft.reference_kl(0.04, estimator=kl.k3))` where the experience has the reference's log-probs.
"""

import dataclasses as dc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor

import rft
from rft.ops import advantages, aggregation, groups, losses, normalisation, returns, shaping

State = rft.RuntimeState[Any, Any, Any, Any]
Ready = rft.RuntimeState[rft.Awake, rft.Fresh, rft.OnDevice, rft.NoOld]
Estimate = Callable[[State, rft.Collected], Float32[Tensor, "batch seq"]]
"""(a living state, rollouts and their rewards) -> the advantage of each sampled token. Collective."""
Collect = Callable[[Ready, Iterator[rft.Prompts], rft.Sampling, rft.RewardFunction], rft.Collected]
"""Generates and scores; most take one batch of prompts."""


def one_batch(state: Ready, prompts: Iterator[rft.Prompts], sampling: rft.Sampling, reward: rft.RewardFunction) -> rft.Collected:
    """The responses to the next batch of prompts, as they come."""
    return rft.collect(state, next(prompts), sampling, reward)


@dc.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What tells one algorithm from another."""

    advantages: Estimate
    objective: rft.Objective
    collect: Collect = one_batch


def of_responses(estimator: Callable[..., Tensor]) -> Estimate:
    """Every token of a response has the response's advantage, estimated over the rows of all ranks."""

    def estimate(state: State, batch: rft.Collected) -> Float32[Tensor, "batch seq"]:
        rollouts, rewards = batch.rollouts, batch.rewards
        each = rft.over_ranks(state, estimator, rewards.values, rollouts.groups, rewards.valid)
        return advantages.per_token(each, rollouts.sampled)

    return estimate


def grpo() -> Algorithm:
    """Rewards normalised in their group; each response weighs the same."""
    objective = rft.policy_loss(partial(losses.ppo_clip, low=0.2, high=0.2), aggregate=aggregation.sequence_mean_of_token_means)
    return Algorithm(advantages=of_responses(advantages.grpo), objective=objective)


def dr_grpo(*, length: int) -> Algorithm:
    """No division by a deviation or by a response's own length; `length` is that of the longest response."""
    aggregate = partial(aggregation.constant_length, length=length)
    objective = rft.policy_loss(partial(losses.ppo_clip, low=0.2, high=0.2), aggregate=aggregate)
    return Algorithm(advantages=of_responses(advantages.dr_grpo), objective=objective)


def dapo(*, length: int, wanted: rft.Wanted) -> Algorithm:
    """More room upwards, every token weighs the same, overlong responses lose reward, and groups that teach nothing are not trained on."""

    def estimate(state: State, batch: rft.Collected) -> Float32[Tensor, "batch seq"]:
        lengths = batch.rollouts.sampled.sum(1)
        shaped = batch.rewards.values + shaping.overlong_penalty(lengths, max_length=length, buffer=max(length // 5, 1))
        return of_responses(advantages.grpo)(state, dc.replace(batch, rewards=dc.replace(batch.rewards, values=shaped)))

    def collect(state: Ready, prompts: Iterator[rft.Prompts], sampling: rft.Sampling, reward: rft.RewardFunction) -> rft.Collected:
        return rft.collect_groups(state, prompts, sampling, reward, wanted)

    objective = rft.policy_loss(partial(losses.ppo_clip, low=0.2, high=0.28), aggregate=aggregation.token_mean)
    return Algorithm(advantages=estimate, objective=objective, collect=collect)


def gspo() -> Algorithm:
    """One ratio for a whole response, and one narrow clip."""
    objective = rft.policy_loss(partial(losses.gspo, low=3e-4, high=4e-4), aggregate=aggregation.sequence_mean_of_token_means)
    return Algorithm(advantages=of_responses(advantages.grpo), objective=objective)


def rloo() -> Algorithm:
    """The others' mean reward as the baseline, and the plain policy gradient of whole responses."""
    objective = rft.policy_loss(losses.policy_gradient, aggregate=aggregation.sequence_mean_of_token_sums)
    return Algorithm(advantages=of_responses(advantages.rloo), objective=objective)


def reinforce_plus_plus() -> Algorithm:
    """No groups: what is to come of a token, normalised over all tokens of the batch."""

    def estimate(state: State, batch: rft.Collected) -> Float32[Tensor, "batch seq"]:
        mask = batch.rollouts.sampled & batch.rewards.valid[:, None]
        return rft.over_ranks(state, returns.reinforce_plus_plus, returns.token_rewards(batch.rewards.values, mask), mask)

    objective = rft.policy_loss(partial(losses.ppo_clip, low=0.2, high=0.2), aggregate=aggregation.token_mean)
    return Algorithm(advantages=estimate, objective=objective)


def cispo() -> Algorithm:
    """The weight is clipped and not the update: no token loses its gradient."""
    objective = rft.policy_loss(partial(losses.cispo, low=1.0, high=0.2), aggregate=aggregation.token_mean)
    return Algorithm(advantages=of_responses(advantages.grpo), objective=objective)


def ppo() -> Algorithm:
    """Generalised advantages against values, normalised over the batch; clipped, with an entropy bonus.

    For the value of a token stands the mean reward of the other responses to its prompt, the same along a response and, where that was
    cut off, after it. `ppo.py` is PPO with a Critic.
    """

    def estimate(state: State, batch: rft.Collected) -> Float32[Tensor, "batch seq"]:
        rewards, mask = batch.rewards, batch.rollouts.sampled & batch.rewards.valid[:, None]
        mean_of_others = rft.over_ranks(state, others, rewards.values, batch.rollouts.groups, rewards.valid)
        values = torch.where(mask, mean_of_others[:, None], 0.0)
        cut_off = torch.tensor([finish == "length" for finish in batch.rollouts.finish], dtype=torch.bool)
        after = torch.where(cut_off, mean_of_others, 0.0)
        found = returns.gae(returns.token_rewards(rewards.values, mask), values, mask, after, gamma=1.0, lam=0.95)
        return rft.over_ranks(state, normalisation.whiten, found.advantages, mask)

    clipped = rft.policy_loss(partial(losses.ppo_clip, low=0.2, high=0.2), aggregate=aggregation.token_mean)
    return Algorithm(advantages=estimate, objective=rft.combined(clipped, rft.entropy_bonus(0.001)))


def others(rewards: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
    """The mean reward of the other rows of each row's group."""
    return (groups.others(rewards, ids, valid) / (groups.count(ids, valid) - 1).clamp(min=1)).float()

"""GRPO, written from steps: the whole loop, to be copied and changed.

Group-normalised advantages, one optimizer step per batch, old log-probs those of that step (so the ratio is 1), no KL. For several
steps on one batch, take `rft.compute_old_logprobs(state, rollouts)` and loop over `rft.minibatches(experience, cut)`.

Source: Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300
"""

import dataclasses as dc
from collections.abc import Iterable

import torch

import rft
from rft.ops import advantages
from rft.recording import shown
from rft.telemetry.run_folder import Telemetry

Rest = rft.RuntimeState[rft.Asleep, rft.Stale, rft.OnDevice, rft.NoOld]
"""Where every iteration begins and ends."""


@dc.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is sampled, what is rewarded, what is minimised."""

    sampling: rft.Sampling
    reward: rft.RewardFunction
    objective: rft.Objective


def train(start: Rest, batches: Iterable[rft.Prompts], recipe: Recipe, run: Telemetry, done: int = 0) -> Rest:
    """One optimizer step for each batch of prompts, after those that are `done`."""
    state = start
    for step, prompts in enumerate(batches, done):
        state = rft.refresh(state)
        rollouts = rft.generate(state, prompts, recipe.sampling)
        rewards = rft.rewards(state, rollouts, recipe.reward)
        state = rft.sleep(state)

        better = advantages.grpo(rewards.values, rollouts.groups, rewards.valid)
        experience = rft.experience(rollouts, rewards.values, advantages.per_token(better, rollouts.sampled))
        state = rft.adopt_logprobs(state, rollouts, source="first_step")
        state, metrics = rft.train_step(state, rft.take(experience, torch.arange(len(experience))), recipe.objective)
        state = rft.finish_batch(state)

        lengths = rollouts.sampled.sum(1).tolist()
        means = rft.average(state, {"reward": rewards.values[rewards.valid].tolist(), "length": lengths, "tokens": [sum(lengths)]})
        run.samples(step, shown(rollouts, rewards))
        run.log(step, {**metrics, **means})
    return state

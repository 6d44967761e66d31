"""GRPO with two local reward models and a rule on generated sums, written from steps: the whole loop, to be copied and changed.

`torchrun --nproc-per-node 2 examples/grpo_rewards.py --model … --reward-models FIRST SECOND`

An iteration: generate; log-probs of the Actor as it is; then the rewards, one reward model on the device at a time, each standardised
over the batch, as their scales are not those of the rule; advantages within each group of the weighted sum; one optimizer step. For want of
trained reward models `reward_models.py` makes two that stand in for some.
"""

import dataclasses as dc
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from grpo import Recipe, Rest
from grpo_arithmetic import GrpoArithmetic, task
from job import Task, carry_out, main

import rft
from rft.ops import advantages, normalisation
from rft.recording import shown
from rft.rewards.combining import combine_rewards
from rft.telemetry.run_folder import Telemetry

Scored = rft.RuntimeState[rft.Asleep, rft.Stale, rft.OnDevice, rft.OldLogProbs]
"""With a batch in hand, and its old log-probs."""


@dc.dataclass(frozen=True, kw_only=True)
class RewardsRecipe(Recipe):
    """What is sampled, what is rewarded, what is minimised. `reward` is the rule, of weight 1."""

    weights: Mapping[str, float]
    """Of each reward model, by name."""


def train(start: Rest, batches: Iterable[rft.Prompts], recipe: RewardsRecipe, run: Telemetry, done: int = 0) -> Rest:
    """One iteration for each batch of prompts, after those that are `done`."""
    state = start
    for iteration, prompts in enumerate(batches, done):
        state = rft.refresh(state)
        rollouts = rft.generate(state, prompts, recipe.sampling)
        state = rft.sleep(state)

        scored = rft.compute_old_logprobs(state, rollouts)
        scored, sources = judged(scored, rollouts, recipe)
        alike = {name: standardised(scored, rewards) for name, rewards in sources.items()}
        rule = rft.rewards(scored, rollouts, recipe.reward)
        rewards = combine_rewards((1.0, rule), *((recipe.weights[name], part) for name, part in alike.items()))

        better = rft.over_ranks(scored, advantages.grpo, rewards.values, rollouts.groups, rewards.valid)
        experience = rft.experience(rollouts, rewards.values, advantages.per_token(better, rollouts.sampled))
        scored, metrics = rft.train_step(scored, rft.take(experience, torch.arange(len(experience))), recipe.objective)
        state = rft.finish_batch(scored)

        lengths, each = rollouts.sampled.sum(1).tolist(), {"reward": rewards, "rule": rule, **sources}
        means = {name: part.values[part.valid].tolist() for name, part in each.items()}
        run.samples(iteration, shown(rollouts, rewards))
        run.log(iteration, {**metrics, **rft.average(state, {**means, "length": lengths, "tokens": [sum(lengths)]})})
    return state


def judged(state: Scored, rollouts: rft.Rollouts, recipe: RewardsRecipe) -> tuple[Scored, dict[str, rft.Rewards]]:
    """What each reward model says; it comes to the device for it, and leaves it for the next."""
    found = dict[str, rft.Rewards]()
    for name in recipe.weights:
        role = rft.reward_model(name)
        state, found[name] = rft.use(state, role, partial(scores_of, rollouts, role))
    return state, found


def scores_of(rollouts: rft.Rollouts, role: rft.Role, there: Scored) -> rft.Rewards:
    """The scores of a reward model, while it is there."""
    return rft.model_rewards(there, rollouts, role)


def standardised(state: Scored, rewards: rft.Rewards) -> rft.Rewards:
    """With mean 0 and deviation 1 over the valid rows of all ranks."""
    return dc.replace(rewards, values=rft.over_ranks(state, normalisation.batch_normalise, rewards.values, rewards.valid))


# ---- the job ----


@dc.dataclass(frozen=True, kw_only=True)
class GrpoRewards(GrpoArithmetic):
    """GRPO with local reward models and a rule on generated sums, with a model that has a chat template."""

    reward_models: tuple[str, ...]
    """Model folders or hub ids: classifiers with one label. Each is called by the last part of its name."""
    weight: float = 0.2
    """Of each of them, in deviations; the rule gives 0 or 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.named()) < len(self.reward_models):
            raise rft.BadInput(f"--reward-models must end in different names, got {', '.join(self.reward_models)}")

    def named(self) -> dict[str, str]:
        """Each reward model by the last part of its name."""
        return {Path(model).name: model for model in self.reward_models}

    def launch_spec(self) -> rft.LaunchSpec:
        """With the reward models, on the host but while they are used."""
        judges = {
            name: rft.RewardModel(model=model, dtype=self.dtype, micro_batch_tokens=self.micro_batch_tokens)
            for name, model in self.named().items()
        }
        return dc.replace(super().launch_spec(), reward_models=judges)

    def recipe(self, rule: rft.RewardFunction) -> RewardsRecipe:
        """What is learnt, and how."""
        weights = dict.fromkeys(self.named(), self.weight)
        return RewardsRecipe(sampling=self.sampling(), reward=rule, objective=rft.grpo(), weights=weights)


def perform(job: GrpoRewards, learning: Task) -> None:
    """GRPO with reward models; see `carry_out`."""
    carry_out(job, learning, "GRPO with reward models", job.recipe(learning.reward), train)


if __name__ == "__main__":
    main(GrpoRewards, task, perform)

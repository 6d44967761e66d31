"""GRPO with a Reference on generated sums, written from steps: the whole loop, to be copied and changed.

`torchrun --nproc-per-node 2 examples/grpo_reference.py --model … [--kl 0.04] [--kl-in-reward 0.01]`

An iteration: generate; log-probs of the Actor as it is, then of the Reference, which comes to the device for it alone; rewards;
advantages within each group; then mini-batches. The penalty on the KL to the Reference is in the loss, in the reward, or in both.

Source: Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300
"""

import dataclasses as dc
from collections.abc import Iterable
from functools import partial

from grpo import Recipe, Rest
from grpo_arithmetic import GrpoArithmetic, task
from jaxtyping import Float32
from job import Task, carry_out, main
from torch import Tensor

import rft
from rft.ops import advantages, aggregation, kl, losses, masked
from rft.recording import shown
from rft.telemetry.run_folder import Telemetry

Scored = rft.RuntimeState[rft.Asleep, rft.Stale, rft.OnDevice, rft.OldLogProbs]
"""With a batch in hand, and its old log-probs."""


@dc.dataclass(frozen=True, kw_only=True)
class ReferenceRecipe(Recipe):
    """What is sampled, what is rewarded, what is minimised: the objective has the penalty on the KL to the Reference in it."""

    cut: rft.Cut
    """Into mini-batches, each of which is one optimizer step."""
    kl_in_reward: float
    """What a nat of a response's log π_old − log π_ref costs of its reward."""


def train(start: Rest, batches: Iterable[rft.Prompts], recipe: ReferenceRecipe, run: Telemetry, done: int = 0) -> Rest:
    """One iteration for each batch of prompts, after those that are `done`."""
    state = start
    for iteration, prompts in enumerate(batches, done):
        state = rft.refresh(state)
        rollouts = rft.generate(state, prompts, recipe.sampling)
        state = rft.sleep(state)

        scored = rft.compute_old_logprobs(state, rollouts)
        scored, reference = rft.use(scored, rft.REFERENCE, partial(referred, rollouts))
        rewards = rft.rewards(scored, rollouts, recipe.reward)

        drift = masked.row_sum(log_ratio(scored, rollouts, reference), rollouts.sampled)
        gained = rewards.values - recipe.kl_in_reward * drift
        better = rft.over_ranks(scored, advantages.grpo, gained, rollouts.groups, rewards.valid)
        tokens = advantages.per_token(better, rollouts.sampled)
        experience = rft.experience(rollouts, rewards.values, tokens, reference=reference)
        state, history = rft.update(scored, experience, recipe.objective, recipe.cut)

        lengths = rollouts.sampled.sum(1).tolist()
        means = {"reward": rewards.values[rewards.valid].tolist(), "drift": drift.tolist(), "length": lengths, "tokens": [sum(lengths)]}
        run.samples(iteration, shown(rollouts, rewards))
        run.log(iteration, {**history[-1], **rft.average(state, means)})
    return state


def referred(rollouts: rft.Rollouts, there: Scored) -> Float32[Tensor, "batch seq"]:
    """The Reference's log-probs, while it is there."""
    return rft.reference_logprobs(there, rollouts)


def log_ratio(state: Scored, rollouts: rft.Rollouts, reference: Float32[Tensor, "batch seq"]) -> Float32[Tensor, "batch seq"]:
    """k1 of the KL to the Reference: log π_old − log π_ref of each sampled token."""
    old = state.old.batches[0].values
    assert old is not None
    return kl.k1(old, reference, rollouts.sampled)


# ---- the job ----


@dc.dataclass(frozen=True, kw_only=True)
class GrpoReference(GrpoArithmetic):
    """GRPO with a Reference on generated sums, with a model that has a chat template."""

    minibatch: int | None = None
    """Responses of one optimizer step, on each rank; by default the whole batch."""
    kl: float = 0.04
    """Coefficient of the penalty in the loss, by k3."""
    kl_in_reward: float = 0.0
    """Coefficient of the penalty in the reward, by k1 summed over a response."""

    def launch_spec(self) -> rft.LaunchSpec:
        """With a Reference: the model as it was, on the host but while it is used."""
        return dc.replace(super().launch_spec(), reference=rft.Reference(dtype=self.dtype, micro_batch_tokens=self.micro_batch_tokens))

    def minibatches(self) -> int:
        """Optimizer steps that a batch is cut into."""
        return -(-self.prompts * self.samples // self.minibatch) if self.minibatch else 1

    def recipe(self, reward: rft.RewardFunction) -> ReferenceRecipe:
        """What is learnt, and how."""
        surrogate = rft.policy_loss(partial(losses.ppo_clip, low=0.2, high=0.2), aggregate=aggregation.sequence_mean_of_token_means)
        penalty = rft.reference_kl(self.kl, estimator=kl.k3, aggregate=aggregation.sequence_mean_of_token_means)
        return ReferenceRecipe(
            sampling=self.sampling(),
            reward=reward,
            objective=rft.combined(surrogate, penalty),
            cut=rft.Cut(size=self.minibatch, seed=self.seed),
            kl_in_reward=self.kl_in_reward,
        )


def perform(job: GrpoReference, learning: Task) -> None:
    """GRPO with a Reference; see `carry_out`."""
    carry_out(job, learning, "GRPO with a Reference", job.recipe(learning.reward), train)


if __name__ == "__main__":
    main(GrpoReference, task, perform)

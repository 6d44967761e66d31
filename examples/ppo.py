"""PPO with a Critic and generalised advantages on generated sums, written from steps: the whole loop, to be copied and changed.

`torchrun --nproc-per-node 2 examples/ppo.py --model … [--critic shared] [--kl 0.01]`

An iteration: generate; log-probs of the Actor as it is, then of the Reference, then values of the Critic, each model's work together;
rewards of single tokens, with the KL penalty among them; advantages and returns; then mini-batches, on each of which Critic and Actor
take a step. In the first `critic_warmup` iterations only the Critic does.

Source: Schulman et al., Proximal Policy Optimization Algorithms, https://arxiv.org/abs/1707.06347
"""

import dataclasses as dc
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from grpo import Recipe, Rest
from grpo_arithmetic import GrpoArithmetic, task
from jaxtyping import Float32
from job import Task, carry_out, main
from torch import Tensor

import rft
from rft.objectives import critic_loss
from rft.ops import aggregation, kl, losses, normalisation, returns
from rft.recording import shown
from rft.telemetry.run_folder import Telemetry

State = rft.RuntimeState[Any, Any, Any, Any]
Scored = rft.RuntimeState[rft.Asleep, rft.Stale, rft.OnDevice, rft.OldLogProbs]
"""With a batch in hand, and its old log-probs."""
Table = Float32[Tensor, "batch seq"]


@dc.dataclass(frozen=True, kw_only=True)
class PPORecipe(Recipe):
    """What is sampled, what is rewarded, and what Actor and Critic learn."""

    critic_objective: rft.ValueObjective
    cut: rft.Cut
    """Into mini-batches: each is one step of the Critic and one of the Actor."""
    critic_warmup: int
    """Iterations in which the Actor does not learn yet."""
    kl: float
    """Coefficient of the penalty on the KL to the Reference, in the reward; at 0 there is no Reference."""
    gamma: float
    lam: float


def train(start: Rest, batches: Iterable[rft.Prompts], recipe: PPORecipe, run: Telemetry, done: int = 0) -> Rest:
    """One iteration for each batch of prompts, after those that are `done`."""
    state = start
    for iteration, prompts in enumerate(batches, done):
        state = rft.refresh(state)
        rollouts = rft.generate(state, prompts, recipe.sampling)
        rewards = rft.rewards(state, rollouts, recipe.reward)
        state = rft.sleep(state)

        scored = rft.compute_old_logprobs(state, rollouts)
        scored, penalty = kl_penalty(scored, rollouts, recipe)
        scored = fetched(scored, rft.CRITIC)
        values = rft.values(scored, rollouts)
        experience = estimated(scored, rollouts, rewards, values, penalty, recipe)

        scored = fetched(scored, rft.CRITIC_OPTIMIZER)
        history = list[dict[str, float]]()
        for minibatch in rft.minibatches(experience, recipe.cut):
            scored, metrics = rft.train_critic(scored, minibatch, recipe.critic_objective)
            history.append({f"critic/{name}": value for name, value in metrics.items()})
            if iteration >= recipe.critic_warmup:
                scored, metrics = rft.train_step(scored, minibatch, recipe.objective)
                history[-1] |= metrics
        scored = put_away(scored, rft.CRITIC, rft.CRITIC_OPTIMIZER)
        state = rft.finish_batch(scored)

        lengths, failed = rollouts.sampled.sum(1).tolist(), (~rewards.valid).tolist()
        means = {"reward": rewards.values[rewards.valid].tolist(), "failed": failed, "length": lengths, "tokens": [sum(lengths)]}
        if penalty is not None:
            means["reference_kl"] = (-penalty[rollouts.sampled] / recipe.kl).tolist()
        run.samples(iteration, shown(rollouts, rewards))
        run.log(iteration, {**mean_of(history), **rft.average(state, means)})
    return state


def kl_penalty(state: Scored, rollouts: rft.Rollouts, recipe: PPORecipe) -> tuple[Scored, Table | None]:
    """−β (log π_old − log π_ref) of each token, k1 of the KL to the Reference, which comes to the device for it; None without one."""
    if not recipe.kl:
        return state, None
    state, reference = rft.use(state, rft.REFERENCE, lambda there: rft.reference_logprobs(there, rollouts))
    old = state.old.batches[0].values
    assert old is not None
    return state, -recipe.kl * kl.k1(old, reference)


def estimated(
    state: State, rollouts: rft.Rollouts, rewards: rft.Rewards, values: Table, penalty: Table | None, recipe: PPORecipe
) -> rft.Experience:
    """Generalised advantages, whitened over the tokens of all ranks, and the returns that the Critic learns.

    A response that the length limit cut off has its reward like any other, and nothing comes after it: its value is not continued. One
    whose reward failed teaches nothing: its advantages are 0, and its returns the values that it has.
    """
    mask = rollouts.sampled & rewards.valid[:, None]
    earned = returns.token_rewards(rewards.values, mask, penalty)
    found = returns.gae(earned, values, mask, torch.zeros(len(rollouts)), gamma=recipe.gamma, lam=recipe.lam)
    whitened = rft.over_ranks(state, normalisation.whiten, found.advantages, mask)
    targets = torch.where(mask, found.returns, values)
    return rft.experience(rollouts, rewards.values, whitened, values=values, returns=targets)


def fetched(state: Scored, role: rft.Role) -> Scored:
    """With a role on the device; a Critic that shares the Actor's hidden states begins there."""
    return state if state.roles.of(role).where == "device" else rft.reload(state, role)


def put_away(state: Scored, *roles: rft.Role) -> Scored:
    """With these roles on the host, where they leave room for the engine."""
    for role in roles:
        state = rft.offload(state, role)
    return state


def mean_of(history: list[dict[str, float]]) -> dict[str, float]:
    """Of each metric over the mini-batches."""
    return {name: sum(metrics[name] for metrics in history) / len(history) for name in history[0]}


# ---- the job ----


@dc.dataclass(frozen=True, kw_only=True)
class PPO(GrpoArithmetic):
    """PPO with a Critic on generated sums, with a model that has a chat template."""

    prompts: int = 16
    """Questions in a batch, on each rank."""
    samples: int = 2
    """Responses to each question. Advantages are relative to the Critic's values, so that one would do."""
    minibatch: int = 16
    """Responses of one optimizer step, on each rank."""
    epochs: int = 2
    """How often each response is trained on."""
    critic: Literal["own", "shared"] = "own"
    """A value head on a model of its own, or on the Actor's hidden states, which takes next to no memory and learns less."""
    critic_lr: float = 5e-5
    """The Critic's learning rate; a shared head bears more."""
    critic_warmup: int = 2
    """Iterations in which only the Critic learns."""
    kl: float = 0.0
    """Coefficient of the penalty on the KL to the model as it was, in the reward; 0: none, and no Reference is made."""
    clip: float = 0.2
    """Of the Actor's ratios."""
    value_clip: float = 0.2
    """New values are held so near to those at collection."""
    gamma: float = 1.0
    """Discount of a token's successors."""
    lam: float = 0.95
    """λ of generalised advantages: 1 trusts rewards alone, 0 the Critic's next value."""

    def launch_spec(self) -> rft.LaunchSpec:
        """With a Critic, and where there is a penalty with a Reference."""
        spec = super().launch_spec()
        assert isinstance(spec.trainer, rft.FSDP2Trainer)
        own = rft.Critic(trainer=dc.replace(spec.trainer, lr=self.critic_lr))
        critic = own if self.critic == "own" else rft.SharedCritic(lr=self.critic_lr)
        return dc.replace(spec, critic=critic, reference=rft.Reference(dtype=self.dtype) if self.kl else None)

    def minibatches(self) -> int:
        """Optimizer steps that a batch is cut into, each epoch."""
        return -(-self.prompts * self.samples // self.minibatch)

    def recipe(self, reward: rft.RewardFunction) -> PPORecipe:
        """What is learnt, and how."""
        surrogate = partial(losses.ppo_clip, low=self.clip, high=self.clip)
        return PPORecipe(
            sampling=self.sampling(),
            reward=reward,
            objective=rft.policy_loss(surrogate, aggregate=aggregation.token_mean),
            critic_objective=critic_loss(clip=self.value_clip),
            cut=rft.Cut(size=self.minibatch, epochs=self.epochs, seed=self.seed),
            critic_warmup=self.critic_warmup,
            kl=self.kl,
            gamma=self.gamma,
            lam=self.lam,
        )


def perform(job: PPO, learning: Task) -> None:
    """PPO; see `carry_out`."""
    carry_out(job, learning, "PPO", job.recipe(learning.reward), train)


if __name__ == "__main__":
    main(PPO, task, perform)

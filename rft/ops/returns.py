"""Rewards, returns and advantages of single tokens.

What stands at column t is about token t: a reward for having sampled it, the value of the state that it was sampled in. `mask` marks
the sampled tokens; it may have holes (what a tool wrote, say), and the token after a marked one is the next marked one of its row.
What is not marked is not read, and 0 in a result. A row without marked tokens is all 0: so is taken out what failed to get a reward,
`mask & valid[:, None]`. Results are targets: nothing here has a gradient. `reinforce_plus_plus` whitens, the others do not.
"""

import dataclasses as dc

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft import tree
from rft.ops.masked import marked
from rft.ops.normalisation import whiten
from rft.ops.parameters import require_within
from rft.shapes import checked


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Returns:
    """Per token, 0 outside the mask: the advantages, and the returns that a critic learns."""

    advantages: Float32[Tensor, "batch seq"]
    returns: Float32[Tensor, "batch seq"]


@checked
def token_rewards(
    rewards: Float[Tensor, "batch"], mask: Bool[Tensor, "batch seq"], each: Float[Tensor, "batch seq"] | None = None
) -> Float32[Tensor, "batch seq"]:
    """The sequence's reward on its last sampled token, and what every token earns by itself.

        r_t = each_t + [t is the last marked token] R

    The KL penalty in the reward is `each = -beta * kl`, with `kl` an estimate per token of the old policy against the reference (k1:
    log π_old − log π_ref): so it bears on all tokens before it, and has no gradient. Rewards of single steps add to it. A row
    without marked tokens has nowhere to put R: it is lost.

    Known as: verl `algorithm.use_kl_in_reward=True`; OpenRLHF `compute_reward`; LightRFT `compute_reward`.
    Source: Ziegler et al., Fine-Tuning Language Models from Human Preferences, https://arxiv.org/abs/1909.08593, equation 2
    """
    last = mask & (_next(mask) == mask.shape[1])
    own = torch.zeros_like(mask, dtype=torch.float32) if each is None else marked(each.detach(), mask)
    return own + torch.where(last, rewards.detach().float()[:, None], 0.0)


@checked
def gae(
    rewards: Float[Tensor, "batch seq"],
    values: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    bootstrap: Float[Tensor, "batch"],
    *,
    gamma: float,
    lam: float,
) -> Returns:
    """Generalised advantage estimation over the marked tokens, and the critic's targets.

        A_t = Σ_k (γ λ)^k δ_{t+k},   δ_t = r_t + γ V_{t+1} − V_t,   returns_t = A_t + V_t

    `values` at t is that of the state before token t. After the last marked token V is `bootstrap`: 0 where the response ended by
    itself, the critic's value of the state after it where it was cut off by the length limit (there the future is not worth 0, it
    was only not seen). The values of a row without marked tokens are not read, its `bootstrap` neither. Not whitened: for that,
    `whiten(advantages, mask)`. Raises `BadInput` for `gamma` or `lam` outside of [0, 1].

    Known as: TRL `PPOTrainer` (whitens inside, no bootstrap); verl `algorithm.adv_estimator=gae` (whitens inside, no bootstrap);
    OpenRLHF `--advantage_estimator gae` (no bootstrap); LightRFT `--advantage_estimator gae` (no bootstrap).
    Source: Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage Estimation,
    https://arxiv.org/abs/1506.02438, equation 16
    """
    require_within("gae", 0, 1, gamma=gamma, lam=lam)
    v = marked(values.detach(), mask)
    following = torch.cat([v, bootstrap.detach().float()[:, None]], dim=1).gather(1, _next(mask))
    residuals = marked(rewards.detach(), mask) + gamma * following - v
    advantages = _discounted(residuals, mask, gamma * lam)
    return Returns(advantages=advantages, returns=advantages + v)


@checked
def reinforce(rewards: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], *, gamma: float) -> Float32[Tensor, "batch seq"]:
    """Discounted returns-to-go: what is earned from a token on.

        G_t = Σ_k γ^k r_{t+k}

    k counts marked tokens. Raises `BadInput` for `gamma` outside of [0, 1].

    Known as: OpenRLHF `get_cumulative_returns`; LightRFT `--advantage_estimator reinforce`.
    Source: Williams, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning,
    https://doi.org/10.1007/BF00992696
    """
    require_within("reinforce", 0, 1, gamma=gamma)
    return _discounted(rewards.detach().float(), mask, gamma)


@checked
def reinforce_plus_plus(
    rewards: Float[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], *, gamma: float = 1.0, eps: float = 1e-8
) -> Float32[Tensor, "batch seq"]:
    """REINFORCE++: returns-to-go of rewards less the KL penalty, whitened over the tokens of the whole batch.

        A_t = (G_t − μ) / (σ + eps),   G_t = Σ_k γ^k r_{t+k},   r_t = [t is the last] R − β kl_t

    `rewards` are `token_rewards(R, mask, -beta * kl)`, with k1 for the KL; μ and σ are over all marked tokens of the batch, σ that of
    the population. The paper has γ = 1. It whitens. Where all returns are equal it is exactly 0. Raises `BadInput` for `gamma`
    outside of [0, 1] or a negative `eps`.

    Known as: verl `algorithm.adv_estimator=reinforce_plus_plus`; OpenRLHF `--advantage_estimator reinforce`.
    Source: Hu et al., REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization,
    https://arxiv.org/abs/2501.03262, equations 4 and 5
    """
    return whiten(reinforce(rewards, mask, gamma=gamma), mask, eps=eps)


def _next(mask: Tensor) -> Tensor:
    """The column of the next marked token after each column; the number of columns where there is none."""
    seq = mask.shape[1]
    columns = torch.where(mask, torch.arange(seq, device=mask.device), seq)
    columns = torch.cat([columns, columns.new_full((len(columns), 1), seq)], dim=1)
    return columns.flip(1).cummin(dim=1).values.flip(1)[:, 1:]


def _discounted(values: Tensor, mask: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay · y of the next marked token, in log₂(seq) steps: each doubles how far a token has looked ahead."""
    sums = torch.where(mask, values, 0.0)
    carried = torch.where(mask, decay, 1.0)
    reach = 1
    while reach < mask.shape[1]:
        ahead = torch.nn.functional.pad(sums[:, reach:], (0, reach))
        sums = sums + carried * ahead
        carried = carried * torch.nn.functional.pad(carried[:, reach:], (0, reach))
        reach *= 2
    return torch.where(mask, sums, 0.0)

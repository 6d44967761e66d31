"""Advantages of whole responses: how much better each is than what was to be expected.

An estimator takes the rewards of a batch and the number of each row's group (the responses to one prompt). All rows of a group must be
here, wherever they stand; where an estimator normalises over the batch, all rows of all ranks. Rows that are not `valid` (their reward
failed) take no part and have 0; their rewards may be anything, those of the others are finite. Everything is computed in float64 from
fp32 rewards and rounded to fp32 once, so neither the order of rows nor ranks shows.

`grpo`, `pass_at_k` and `reinforce_baseline` divide by a deviation, which is whitening; the others do not, and `normalisation` may
follow them. Advantages are constants to an objective: nothing here has a gradient.
"""

import math

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from rft.errors import BadInput
from rft.ops import groups as grouped
from rft.ops.normalisation import batch_normalise
from rft.ops.parameters import require_positive, require_within
from rft.shapes import checked


@checked
def grpo(
    rewards: Float[Tensor, "batch"],
    groups: Int64[Tensor, "batch"],
    valid: Bool[Tensor, "batch"] | None = None,
    *,
    ddof: int = 0,
    eps: float = 1e-6,
) -> Float32[Tensor, "batch"]:
    """GRPO: rewards less their group's mean, divided by its deviation.

        A_i = (r_i − μ) / (σ + eps),   σ = √(Σ_{j ∈ group(i)} (r_j − μ)² / (n − ddof))

    n is the number of valid rows of the group. `ddof` 0 takes the deviation of the population, 1 that of a sample; the paper says only
    "std". A group of one and one whose rewards are all equal have exactly 0. It whitens each group, so nothing else should. Raises
    `BadInput` for a `ddof` other than 0 or 1 and for a negative `eps`.

    Known as: TRL `GRPOConfig(scale_rewards="group")` (ddof 1, eps 1e-4); verl `algorithm.adv_estimator=grpo` (ddof 1, eps 1e-6, and a
    group of one keeps its reward); OpenRLHF `--advantage_estimator group_norm` (ddof 1, eps 1e-9); LightRFT `--advantage_estimator
    group_norm` (ddof 1, eps 1e-9).
    Source: Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1
    """
    require_within("grpo", 0, math.inf, eps=eps)
    x = rewards.float()
    centred = x - grouped.mean(x, groups, valid)
    return _where(_differs(x, groups, valid), centred / (grouped.deviation(x, groups, valid, ddof=ddof) + eps))


@checked
def dr_grpo(
    rewards: Float[Tensor, "batch"], groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None
) -> Float32[Tensor, "batch"]:
    """Dr. GRPO: rewards less their group's mean.

        A_i = r_i − μ,   μ = Σ_{j ∈ group(i)} r_j / n

    Without the division easy and hard prompts weigh alike. A group of one and one whose rewards are all equal have exactly 0. The
    paper's other half, a loss divided by a constant length, is the objective's aggregation.

    Known as: TRL `GRPOConfig(scale_rewards="none")`; verl `algorithm.norm_adv_by_std_in_grpo=False` (a group of one keeps its
    reward); OpenRLHF `--advantage_estimator dr_grpo`; LightRFT `--advantage_estimator reinforce_baseline`.
    Source: Liu et al., Understanding R1-Zero-Like Training: A Critical Perspective, https://arxiv.org/abs/2503.20783
    """
    x = rewards.float()
    return _where(_valid(x, valid), x - grouped.mean(x, groups, valid))


@checked
def rloo(
    rewards: Float[Tensor, "batch"], groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None
) -> Float32[Tensor, "batch"]:
    """RLOO: rewards less the mean reward of the other responses to the same prompt.

        A_i = r_i − Σ_{j ∈ group(i), j ≠ i} r_j / (n − 1)

    The baseline does not depend on the response, so the policy gradient stays unbiased; it is n / (n − 1) times `dr_grpo`. A group of
    one has nothing to be compared with: 0.

    Known as: TRL `RLOOTrainer`; verl `algorithm.adv_estimator=rloo` (a group of one keeps its reward); OpenRLHF
    `--advantage_estimator rloo`; LightRFT `--advantage_estimator rloo`.
    Source: Ahmadian et al., Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs,
    https://arxiv.org/abs/2402.14740; Kool et al., Buy 4 REINFORCE Samples, Get a Baseline for Free!,
    https://openreview.net/forum?id=r1lgTGL5DE
    """
    x, count = rewards.float(), grouped.count(groups, valid)
    baseline = grouped.others(x, groups, valid) / (count - 1).clamp(min=1)
    return _where(_valid(x, valid) & (count > 1), x - baseline)


@checked
def remax(
    rewards: Float[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None, *, greedy: Float[Tensor, "batch"]
) -> Float32[Tensor, "batch"]:
    """ReMax: rewards less that of the greedy response to the same prompt.

        A_i = r_i − r(greedy response to the prompt of i)

    `greedy` has the greedy response's reward at every row of its prompt; it must be sampled from the same weights, at temperature 0.
    A row is `valid` where both rewards are.

    Known as: verl `algorithm.adv_estimator=remax`.
    Source: Li et al., ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models,
    https://arxiv.org/abs/2310.10505
    """
    return _where(_valid(rewards, valid), rewards.float().double() - greedy.float())


@checked
def opo(
    rewards: Float[Tensor, "batch"],
    groups: Int64[Tensor, "batch"],
    valid: Bool[Tensor, "batch"] | None = None,
    *,
    lengths: Int64[Tensor, "batch"],
) -> Float32[Tensor, "batch"]:
    """OPO: rewards less the length-weighted mean reward of their group.

        A_i = r_i − Σ_{j ∈ group(i)} l_j r_j / Σ_{j ∈ group(i)} l_j

    `lengths` l counts sampled tokens. This baseline has the least variance if a gradient's squared norm is proportional to the
    response's length. A group of one and one whose rewards are all equal have exactly 0, and so has a group without a token. The
    paper trains strictly on policy. Raises `BadInput` for a negative length.

    Known as: verl `algorithm.adv_estimator=opo` (a group of one keeps its reward).
    Source: Hao et al., On-Policy RL with Optimal Reward Baseline, https://arxiv.org/abs/2505.23585
    """
    x, tokens, marked = rewards.float(), lengths.double(), _valid(rewards, valid)
    if bool((lengths[marked] < 0).any()):
        raise BadInput("opo: lengths count sampled tokens, at least 0")
    total = grouped.total(tokens, groups, valid)
    baseline = grouped.total(tokens * x, groups, valid) / total.clamp(min=1)
    return _where(marked & (total > 0), x - baseline)


@checked
def cpgd(
    rewards: Float[Tensor, "batch"],
    groups: Int64[Tensor, "batch"],
    valid: Bool[Tensor, "batch"] | None = None,
    *,
    cap: float,
) -> Float32[Tensor, "batch"]:
    """CPGD: rewards less their group's mean, scaled up for the groups that teach nothing.

        A_i = ω (r_i − μ),   ω = min(cap, #groups / #groups whose rewards differ)

    This is the paper's "clip-filter-like" weight: a batch keeps its scale however many of its groups have equal rewards, up to `cap`.
    Groups without valid rows are not counted. The paper's other weights are `dr_grpo` (equal weight, ω = 1) and `grpo` (STD weight,
    ω = 1 / σ). Raises `BadInput` where `cap` is not above 0.

    Known as: LightRFT `--advantage_estimator cpgd` (whose own weight is STD, `grpo` here).
    Source: Liu et al., CPGD: Toward Stable Rule-based Reinforcement Learning for Language Models, https://arxiv.org/abs/2505.12504,
    section 4.3 (III)
    """
    require_positive("cpgd", cap=cap)
    x, marked = rewards.float(), _valid(rewards, valid)
    teaching = groups[_differs(x, groups, valid)].unique()
    weight = min(cap, len(groups[marked].unique()) / max(1, len(teaching)))
    return _where(marked, weight * (x - grouped.mean(x, groups, valid)))


@checked
def pass_at_k(
    rewards: Float[Tensor, "batch"], groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None, *, k: int
) -> Float32[Tensor, "batch"]:
    """Pass@k training for rewards of 0 or 1: what a response adds to the k-subsets that it is in.

        A = (1 − R) / σ where r = 1,   A = (1 − R − C(m − 1, k − 1) / C(n − 1, k − 1)) / σ where r = 0
        R = 1 − C(m, k) / C(n, k),   σ = √(R (1 − R))

    Of the n valid rows of the group m have reward 0. A subset of k rows succeeds if one of its rows does; R and σ are mean and
    deviation of that over all subsets, and A is the mean over those with the response, so normalised. It whitens each group. At k = 1
    it is `grpo` with eps 0. Exactly 0 where all subsets agree (no success, or fewer than k failures), and where the group has fewer
    than k valid rows. Raises `BadInput` for k below 1 and for rewards other than 0 and 1 (`max_at_k` takes any).

    Source: Chen et al., Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large Reasoning Models,
    https://arxiv.org/abs/2508.10751 (its code adds 1e-6 to σ)
    """
    marked = _valid(rewards, valid)
    require_within("pass_at_k", 1, math.inf, k=k)
    if bool(((rewards[marked] != 0) & (rewards[marked] != 1)).any()):
        raise BadInput("pass_at_k is for rewards of 0 or 1; take max_at_k for others")
    count = grouped.count(groups, valid)
    failures = count - grouped.total(rewards, groups, valid)
    failing = _choose(failures, count, k)
    own = torch.where(rewards == 1, 0.0, _choose(failures - 1, count - 1, k - 1))
    deviation = (failing * (1 - failing)).sqrt()
    teaches = marked & (deviation > 0)
    return _where(teaches, (failing - own) / torch.where(teaches, deviation, 1.0))


@checked
def max_at_k(
    rewards: Float[Tensor, "batch"], groups: Int64[Tensor, "batch"], valid: Bool[Tensor, "batch"] | None = None, *, k: int
) -> Float32[Tensor, "batch"]:
    """PKPO: by how much a response raises the best reward of the k-subsets that it is in.

        A_i = k · mean_J max(r_i − max_{j ∈ J} r_j, 0),   J over the (k − 1)-subsets of the other rows of the group

    The gradient of mean_i A_i log π(y_i) estimates that of the expected best of k rewards, without bias: what is subtracted does not
    depend on the response. It is the paper's s^(loo−1), times n, since it sums over rows where objectives here take the mean. Rewards
    may be any numbers. It is never negative, and does not whiten. Exactly 0 where rewards are equal and where the group has fewer
    than k valid rows. Computed from the ranks in the group, not from the subsets. Raises `BadInput` for k below 2 (k = 1: `rloo`).

    Known as: verl `algorithm.adv_estimator=grpo_passk` (k = n, divided by n, and by the group's deviation unless
    `algorithm.norm_adv_by_std_in_grpo=False`).
    Source: Walder and Karkhanis, Pass@K Policy Optimization: Solving Harder Reinforcement Learning Problems,
    https://arxiv.org/abs/2505.15201
    """
    require_within("max_at_k", 2, math.inf, k=k)
    x, marked = rewards.float(), _valid(rewards, valid)
    count, rank = grouped.count(groups, valid), grouped.rank(x, groups, valid)
    # A step up from one reward of the group to the next counts as often as all of J lies below it: C(p, k − 1) of C(n − 1, k − 1) times.
    below = _choose(rank, count - 1, k - 1)
    return _where(marked, k * _climbed(torch.where(marked, x, 0.0).double(), below, groups, rank))


@checked
def reinforce_baseline(
    rewards: Float[Tensor, "batch"],
    groups: Int64[Tensor, "batch"],
    valid: Bool[Tensor, "batch"] | None = None,
    *,
    lengths: Int64[Tensor, "batch"],
    eps: float = 1e-8,
) -> Float32[Tensor, "batch"]:
    """REINFORCE++ with baseline: rewards less their group's mean, normalised over the tokens of the whole batch.

        A_i = (a_i − μ) / (σ + eps),   a_i = r_i − mean(group of i),   μ, σ over the batch, a_i counted l_i times

    `lengths` l counts sampled tokens: the paper normalises over the advantages of tokens, so a long response weighs more in μ and σ.
    Where each response should count once, take `batch_normalise(dr_grpo(rewards, groups, valid), valid)`. It whitens. Exactly 0 where
    no group's rewards differ. Its KL penalty is a term of the loss (k2), not of the reward. Raises `BadInput` for a negative length
    or `eps`.

    Known as: verl `algorithm.adv_estimator=reinforce_plus_plus_baseline`; OpenRLHF `--advantage_estimator reinforce_baseline`;
    LightRFT `--advantage_estimator reinforce_baseline --advantages_norm`.
    Source: Hu et al., REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization,
    https://arxiv.org/abs/2501.03262, equations 6 and 7
    """
    return batch_normalise(dr_grpo(rewards, groups, valid), valid, weights=lengths, eps=eps)


@checked
def per_token(advantages: Float32[Tensor, "batch"], sampled: Bool[Tensor, "batch seq"]) -> Float32[Tensor, "batch seq"]:
    """Gives every sampled token its sequence's advantage.

        A_{i,t} = A_i where token t of row i was sampled, else 0

    How much a response's tokens weigh together is then a matter of the aggregation.
    """
    return torch.where(sampled, advantages[:, None], 0.0)


def _valid(rewards: Tensor, valid: Tensor | None) -> Tensor:
    return torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid


def _differs(rewards: Tensor, groups: Tensor, valid: Tensor | None) -> Tensor:
    return _valid(rewards, valid) & ~grouped.all_equal(rewards, groups, valid)


def _where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), 0.0).float()


def _choose(a: Tensor, b: Tensor, k: int) -> Tensor:
    """C(a, k) / C(b, k) = Π_{j < k} (a − j) / (b − j) in float64; 0 where a < k."""
    steps = torch.arange(k, dtype=torch.float64, device=a.device)
    return ((a[:, None] - steps).clamp(min=0) / (b[:, None] - steps).clamp(min=1)).prod(dim=1)


def _climbed(values: Tensor, weights: Tensor, groups: Tensor, rank: Tensor) -> Tensor:
    """Of each row, the sum of the weighted steps that lead from its group's first value by rank up to its own."""
    names, member = groups.unique(return_inverse=True)
    width = int(rank.max()) + 1 if len(rank) else 1
    heights, shares = (values.new_zeros(len(names), width).index_put((member, rank), x) for x in (values, weights))
    return (heights.diff(dim=1, prepend=heights[:, :1]) * shares).cumsum(dim=1)[member, rank]

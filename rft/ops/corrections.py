"""What makes up for tokens that were not sampled from the policy which the loss is about.

An engine gives the tokens that it samples other log-probs than the trainer does under the same weights, and stale rollouts come from
older weights. The mean of w f over the tokens of the engine, with w = trainer's probability / engine's, is the trainer's mean of f;
but w has a heavy tail, and each correction deals with it in its way.

All take `(old, engine, mask)` of shape `[batch, seq]`: the trainer's log-probs of the sampled tokens, and those that they were
sampled with. All is computed in fp32 and has no gradient; multiply the loss of each token by the weights. A dropped token weighs 0
and keeps its place in the loss's denominator. What stands outside of the mask is not read.

In the formulas l_t = old_t − engine_t, and n is the number of a row's marked tokens; ratios are held to e^±20.

Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, https://fengyao.notion.site/off-policy-rl;
Liu et al., When Speed Kills Stability, https://richardli.xyz/rl-collapse
"""

import dataclasses as dc
import math
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from rft.ops.aggregation import Totals, token_mean
from rft.ops.masked import marked, row_mean, row_sum
from rft.ops.metrics import Metric, effective_sample_size, maximum, quantiles
from rft.ops.parameters import require_within
from rft.ops.ratios import bounded_exp, log_ratio
from rft.shapes import checked

Tokens: TypeAlias = Float[Tensor, "batch seq"]
Mask: TypeAlias = Bool[Tensor, "batch seq"]


@dc.dataclass(frozen=True, kw_only=True)
class Correction:
    """Per token: the weight of its loss, whether it is kept at all (else its weight is 0), and whether its weight was cut.

    Outside the mask nothing is corrected: 1, True and False.
    """

    weights: Float32[Tensor, "batch seq"]
    kept: Bool[Tensor, "batch seq"]
    clipped: Bool[Tensor, "batch seq"]


@checked
def truncated(old: Tokens, engine: Tokens, mask: Mask, *, cap: float) -> Correction:
    """Truncated importance sampling (TIS), token by token.

        w_t = min(exp(l_t), cap)

    The cap bounds the variance at the price of a little bias; ignoring how earlier tokens led here is a bias, too, and remains.
    Raises `BadInput` for a cap below 1, which would scale down what needs no correction.

    Known as: TRL `vllm_importance_sampling_mode="token_truncate"`; verl `rollout_is="token"`; OpenRLHF
    `vllm_is_correction_type="tis"` (which has a lower bound, too).
    Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training,
    https://fengyao.notion.site/off-policy-rl; Ionides, Truncated Importance Sampling, https://doi.org/10.1198/106186008X320456
    """
    require_within("truncated", 1, math.inf, cap=cap)
    return _truncation(_token_ratio(old, engine, mask), mask, cap)


@checked
def truncated_sequence(old: Tokens, engine: Tokens, mask: Mask, *, cap: float) -> Correction:
    """Truncated importance sampling of whole sequences.

        w = min(exp(Σ_t l_t), cap),   the same for every token of a row

    Without the cap this is the unbiased one; the product's spread grows with the length. Raises `BadInput` for a cap below 1.

    Known as: TRL `vllm_importance_sampling_mode="sequence_truncate"`; verl `rollout_is="sequence"`.
    Source: Liu et al., When Speed Kills Stability, https://richardli.xyz/rl-collapse
    """
    require_within("truncated_sequence", 1, math.inf, cap=cap)
    return _truncation(_product_ratio(old, engine, mask), mask, cap)


@checked
def masked(old: Tokens, engine: Tokens, mask: Mask, *, cap: float) -> Correction:
    """Masked importance sampling (MIS), token by token: what truncation would cut is dropped.

        w_t = exp(l_t) where it is ≤ cap, 0 elsewhere

    A ratio that large says that the token lies outside of what the engine samples, rather than that it is worth so much. Raises
    `BadInput` for a cap below 1, which would drop what needs no correction.

    Known as: TRL `vllm_importance_sampling_mode="token_mask"`.
    Source: Liu et al., When Speed Kills Stability, https://richardli.xyz/rl-collapse
    """
    require_within("masked", 1, math.inf, cap=cap)
    return _selection(_token_ratio(old, engine, mask), mask, 0.0, cap)


@checked
def masked_sequence(old: Tokens, engine: Tokens, mask: Mask, *, cap: float) -> Correction:
    """Masked importance sampling of whole sequences.

        w = exp(Σ_t l_t) where it is ≤ cap, 0 elsewhere,   the same for every token of a row

    Long rows exceed any cap more often; `geometric_rejection` does not depend on the length. Raises `BadInput` for a cap below 1.

    Known as: TRL `vllm_importance_sampling_mode="sequence_mask"`.
    Source: Liu et al., When Speed Kills Stability, https://richardli.xyz/rl-collapse
    """
    require_within("masked_sequence", 1, math.inf, cap=cap)
    return _selection(_product_ratio(old, engine, mask), mask, 0.0, cap)


@checked
def icepop(old: Tokens, engine: Tokens, mask: Mask, *, low: float, high: float) -> Correction:
    """IcePop: tokens on which the two disagree either way are dropped.

        w_t = exp(l_t) where it lies in [low, high], 0 elsewhere

    Raises `BadInput` unless 0 ≤ low ≤ 1 ≤ high, as else what needs no correction would be dropped.

    Known as: OpenRLHF `vllm_is_correction_type="icepop"`; verl `rollout_rs="token_k1"` with `rollout_is="token"` (its bounds are of the
    inverse ratio).
    Source: Ling Team, Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model,
    https://arxiv.org/abs/2510.18855
    """
    _check_bounds("icepop", low, high)
    return _selection(_token_ratio(old, engine, mask), mask, low, high)


@checked
def geometric_rejection(old: Tokens, engine: Tokens, mask: Mask, *, low: float, high: float) -> Correction:
    """Whole sequences are rejected by the geometric mean of their tokens' ratios.

        w = 1 where exp(1/n Σ_t l_t) lies in [low, high], 0 elsewhere,   the same for every token of a row

    It filters alone; to weigh what is left, join it with another by `combined`. The mean does not
    depend on the length, so its bounds are narrow, such as 1 ± 0.001. Raises `BadInput` unless 0 ≤ low ≤ 1 ≤ high.

    Known as: verl `rollout_rs="seq_mean_k1"`, formerly `"geometric"` (its bounds are of the inverse ratio); OpenRLHF
    `vllm_is_correction_type="seq-mask-tis"` (which weighs by the tokens' ratios, too).
    Source: Liu et al., When Speed Kills Stability, part 3, https://richardli.xyz/rl-collapse
    """
    _check_bounds("geometric_rejection", low, high)
    mean = bounded_exp(row_mean(_change(old, engine, mask), mask))[:, None]
    selected = _selection(mean.expand_as(mask), mask, low, high)
    return dc.replace(selected, weights=selected.kept.float())


@checked
def decoupled(proximal: Tokens, behaviour: Tokens, mask: Mask, *, cap: float = math.inf) -> Correction:
    """Decoupled PPO, for stale rollouts: the policy that the clip is measured from is not the one that sampled.

        w_t = exp(proximal_t − behaviour_t) where it is ≤ cap, 0 elsewhere

    With it, `ppo_clip` whose `old` is the proximal policy (the weights just before this batch's updates, `compute_old_logprobs`) is
    the decoupled objective: the clip bounds the update, the weight makes up for the staleness. The original has no cap; AReaL drops
    the tokens beyond one. As a formula this is `masked`. Raises `BadInput` for a cap below 1.

    Known as: AReaL `use_decoupled_loss`, `behav_imp_weight_cap`; verl `rollout_correction.bypass_mode=False`.
    Source: Hilton et al., Batch size-invariance for policy optimization, https://arxiv.org/abs/2110.00641; Fu et al., AReaL,
    https://arxiv.org/abs/2505.24298
    """
    require_within("decoupled", 1, math.inf, cap=cap)
    return _selection(_token_ratio(proximal, behaviour, mask), mask, 0.0, cap)


@checked
def combined(first: Correction, second: Correction) -> Correction:
    """Both corrections at once, such as a rejection of sequences and a weight for what it leaves.

        w_t = w¹_t w²_t

    A token is kept where both keep it, and clipped where either cut its weight and it is kept. In an objective it stands in a function
    of its own: `def both(old, engine, mask): return combined(truncated(old, engine, mask, cap=2.0), masked(old, engine, mask, cap=8.0))`.

    Source: Liu et al., When Speed Kills Stability, part 3, https://richardli.xyz/rl-collapse
    """
    kept = first.kept & second.kept
    return Correction(weights=first.weights * second.weights, kept=kept, clipped=kept & (first.clipped | second.clipped))


@checked
def mismatch(trainer: Tokens, engine: Tokens, mask: Mask, totals: Totals) -> dict[str, Tensor | Metric]:
    """How far engine and trainer are apart on the tokens that were sampled: this part's share of the batch's metrics.

        gap_t = |trainer_t − engine_t|,   ratio_t = exp(trainer_t − engine_t)

    `engine_gap` and `engine_gap_max`: mean and largest gap in nats; `engine_gap_p50`, `_p90` and `_p99`: its quantiles, to within 1.5%;
    `engine_ratio_outside`: the share of tokens whose ratio lies outside of [0.9, 1.1]. All over the tokens of the global batch; 0 where
    there are none. Where the sampling cuts the distribution (`top_p`, `top_k`, `min_p`), the mass that it cut is part of the gap.

    Source: Liu et al., When Speed Kills Stability, https://richardli.xyz/rl-collapse
    """
    change = _change(trainer, engine, mask)
    size, ratio = change.abs(), bounded_exp(change)
    named = zip(("p50", "p90", "p99"), quantiles(size, mask, (0.5, 0.9, 0.99)), strict=True)
    return {
        "engine_gap": token_mean(size, mask, totals),
        "engine_gap_max": maximum(size, mask),
        **{f"engine_gap_{name}": quantile for name, quantile in named},
        "engine_ratio_outside": token_mean(((ratio < 0.9) | (ratio > 1.1)).float(), mask, totals),
    }


@checked
def weighting(correction: Correction, mask: Mask, totals: Totals) -> dict[str, Tensor | Metric]:
    """What a correction does to the tokens of a batch: this part's share of the batch's metrics.

        effective_sample_size = (Σ w_t)² / (n Σ w_t²)

    of the weights, dropped ones being 0; `weight`: their mean; `weight_clipped` and `weight_masked`: the shares of tokens whose weight
    was cut, and that were dropped. All over the tokens of the global batch; 0 where there are none.

    Source: Liu et al., When Speed Kills Stability, https://richardli.xyz/rl-collapse
    """
    return {
        "weight": token_mean(correction.weights, mask, totals),
        "weight_clipped": token_mean(correction.clipped.float(), mask, totals),
        "weight_masked": token_mean((~correction.kept).float(), mask, totals),
        "effective_sample_size": effective_sample_size(correction.weights, mask),
    }


def _change(old: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
    return log_ratio(old.detach(), engine.detach(), mask)


def _token_ratio(old: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
    return bounded_exp(_change(old, engine, mask))


def _product_ratio(old: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
    return bounded_exp(row_sum(_change(old, engine, mask), mask))[:, None].expand_as(mask)


def _truncation(ratio: Tensor, mask: Tensor, cap: float) -> Correction:
    weights = torch.where(mask, ratio.clamp(max=cap), 1.0)
    return Correction(weights=weights, kept=torch.ones_like(mask), clipped=mask & (ratio > cap))


def _selection(ratio: Tensor, mask: Tensor, low: float, high: float) -> Correction:
    kept = (ratio >= low) & (ratio <= high) | ~mask
    return Correction(weights=torch.where(mask, marked(ratio, kept), 1.0), kept=kept, clipped=torch.zeros_like(mask))


def _check_bounds(where: str, low: float, high: float) -> None:
    require_within(where, 0, 1, low=low)
    require_within(where, 1, math.inf, high=high)

"""What a loss is to a trainer (`protocol`), and how one is composed of small ones (`compositions`)."""

from rft.objectives.compositions import combined, critic_loss, entropy_bonus, grpo, imitation, policy_loss, reference_kl, supervised
from rft.objectives.protocol import (
    OBJECTIVE,
    VALUE_OBJECTIVE,
    LossTerms,
    MicroBatch,
    Objective,
    TokenScores,
    ValueObjective,
    check_terms,
)
from rft.ops.aggregation import Totals

__all__ = [
    "OBJECTIVE",
    "VALUE_OBJECTIVE",
    "LossTerms",
    "MicroBatch",
    "Objective",
    "TokenScores",
    "Totals",
    "ValueObjective",
    "check_terms",
    "combined",
    "critic_loss",
    "entropy_bonus",
    "grpo",
    "imitation",
    "policy_loss",
    "reference_kl",
    "supervised",
]

"""GRPO with a Reference, and with reward models, with a rule that a model without sense gets too: grpo_ranks.py FOLDER MODELS ARGUMENTS.

The runs are FOLDER/loss and FOLDER/reward, where the penalty on the KL to the Reference is, and FOLDER/judged.
"""

import dataclasses as dc
import sys
from typing import Any

import grpo_reference
import grpo_rewards
import job

import rft


def by_bytes(sample: rft.Sample) -> float:
    """Something that differs between responses."""
    return sum(sample.response.encode()) % 7 / 7


def run(example: Any, kind: Any, *arguments: str) -> None:
    sys.argv[1:] = arguments
    job.main(kind, lambda given: dc.replace(example.task(given), reward=by_bytes), example.perform)


if __name__ == "__main__":
    folder, models, *arguments = sys.argv[1:]
    for where, penalty in (("loss", ("--kl", "0.5")), ("reward", ("--kl", "0", "--kl-in-reward", "0.5"))):
        run(grpo_reference, grpo_reference.GrpoReference, *arguments, "--folder", f"{folder}/{where}", *penalty)
    judges = ("--reward-models", f"{models}/kind", f"{models}/brief")
    run(grpo_rewards, grpo_rewards.GrpoRewards, *arguments, "--folder", f"{folder}/judged", *judges)

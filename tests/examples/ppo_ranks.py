"""PPO of `examples/ppo.py` with every kind of Critic, with a reward that a model without sense gets too: ppo_ranks.py FOLDER ARGUMENTS.

The runs are FOLDER/own, with a penalty on the KL to a Reference, and FOLDER/shared.
"""

import dataclasses as dc
import sys

import job
import ppo

import rft


def by_bytes(sample: rft.Sample) -> float:
    """Something that differs between responses."""
    return sum(sample.response.encode()) % 7 / 7


if __name__ == "__main__":
    folder, arguments = sys.argv[1], sys.argv[2:]
    for critic, kl in (("own", "0.1"), ("shared", "0")):
        sys.argv[1:] = [*arguments, "--folder", f"{folder}/{critic}", "--critic", critic, "--kl", kl]
        job.main(ppo.PPO, lambda given: dc.replace(ppo.task(given), reward=by_bytes), ppo.perform)

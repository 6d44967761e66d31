"""GRPO on generated sums: "What is A + B?", rewarded where the last number of the reply is right.

Two CPU cores take minutes: `bash examples/run.sh`. Elsewhere: `torchrun --nproc-per-node 2 examples/grpo_arithmetic.py --model …`.
"""

import dataclasses as dc

from job import Job, Task, main, perform

from rft.data.arithmetic import sums
from rft.rewards.rules import last_number


@dc.dataclass(frozen=True, kw_only=True)
class GrpoArithmetic(Job):
    """GRPO on generated sums, with a model that has a chat template."""

    steps: int = 40
    """Optimizer steps; each takes one batch of fresh responses."""
    prompts: int = 4
    """Questions in a batch, on each rank."""
    max_prompt_tokens: int = 128
    """Longest prompt, in tokens; a longer question is refused before anything runs."""
    max_new_tokens: int = 24
    """Longest response, in tokens."""
    lr: float = 1e-5
    """AdamW's learning rate."""
    largest: int = 50
    """A and B go from 1 to this."""
    held_out: int = 128
    """Sums that are never trained on, in neither order: accuracy is measured with them, before and after."""


def task(job: GrpoArithmetic) -> Task:
    """The sums, split by the job's seed."""
    split = sums(largest=job.largest, held_out=job.held_out, seed=job.seed)
    return Task(name="sums", training=split.train, held_out=split.held_out, reward=last_number)


if __name__ == "__main__":
    main(GrpoArithmetic, task, perform)

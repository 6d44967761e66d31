"""GRPO on GSM8K, grade-school word problems, rewarded where the final answer equals the reference as mathematics.

`torchrun --nproc-per-node 2 examples/grpo_gsm8k.py --model FOLDER-OR-HUB-ID --train train.jsonl --test test.jsonl`
"""

import dataclasses as dc

from job import Job, Task, main, perform

from rft.data.gsm8k import gsm8k
from rft.rewards.rules import math_answer


@dc.dataclass(frozen=True, kw_only=True)
class GrpoGsm8k(Job):
    """GRPO on GSM8K, with a model that has a chat template. Needs the packages of rft-runtime[gsm8k]."""

    steps: int = 200
    """Optimizer steps; each takes one batch of fresh responses."""
    prompts: int = 8
    """Questions in a batch, on each rank."""
    max_prompt_tokens: int = 512
    """Longest prompt, in tokens; a longer question is refused before anything runs."""
    max_new_tokens: int = 512
    """Longest response, in tokens."""
    lr: float = 1e-6
    """AdamW's learning rate."""
    train: str = "openai/gsm8k"
    """Questions to train on: a JSON-lines file, or a hub id (its train split)."""
    test: str = "openai/gsm8k"
    """Questions to measure with: a JSON-lines file, or a hub id (its test split)."""
    held_out: int = 128
    """So many questions of `test`, the first ones, are measured with."""


def task(job: GrpoGsm8k) -> Task:
    """The questions of both splits."""
    training, held_out = gsm8k(job.train, split="train"), gsm8k(job.test, split="test")
    return Task(name="gsm8k", training=training, held_out=held_out[: max(job.held_out, 0)], reward=math_answer())


if __name__ == "__main__":
    main(GrpoGsm8k, task, perform)

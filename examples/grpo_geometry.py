"""GRPO on questions about figures, in the manner of Geometry3K: an image, a question, an answer that can be checked.

`torchrun --nproc-per-node 2 examples/grpo_geometry.py --model FOLDER-OR-HUB-ID --train train.jsonl --test test.jsonl`

The model takes images (Qwen2.5-VL). The files' format is in `rft.data.geometry`: one object on each line, such as

    {"images": ["figures/1.png"], "problem": "Find x.", "answer": "6.5"}

The reward is 1 where the final answer equals the reference as mathematics, else 0.

Source: Lu et al., Inter-GPS, https://arxiv.org/abs/2105.04165
"""

import dataclasses as dc

from job import Job, Task, main, perform

from rft.data.geometry import geometry
from rft.rewards.rules import math_answer


@dc.dataclass(frozen=True, kw_only=True)
class GrpoGeometry(Job):
    """GRPO on questions about figures, with a model that takes images. Needs the packages of rft-runtime[gsm8k,vision]."""

    steps: int = 200
    """Optimizer steps; each takes one batch of fresh responses."""
    prompts: int = 8
    """Questions in a batch, on each rank."""
    max_prompt_tokens: int = 1536
    """Longest prompt, in tokens, of which its images take many; a longer question is refused before anything runs."""
    max_new_tokens: int = 512
    """Longest response, in tokens."""
    lr: float = 1e-6
    """AdamW's learning rate."""
    train: str
    """Questions to train on: a JSON-lines file, with its images beside it."""
    test: str
    """Questions to measure with: a file of the same kind."""
    held_out: int = 128
    """So many questions of `test`, the first ones, are measured with."""


def task(job: GrpoGeometry) -> Task:
    """The questions of both files."""
    training, held_out = geometry(job.train), geometry(job.test)
    return Task(name="geometry", training=training, held_out=held_out[: max(job.held_out, 0)], reward=math_answer())


if __name__ == "__main__":
    main(GrpoGeometry, task, perform)

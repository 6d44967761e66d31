"""The learning rate as a pure function of the step."""

import math

from rft.spec.training import Optimization


def learning_rate(spec: Optimization, step: int) -> float:
    """The learning rate of the optimizer step number `step`, which counts from 0.

    Warm-up: lr · step / warmup_steps, so that the first step of all measures without moving. Then, with x from 0 at the end of
    the warm-up to 1 at `total_steps`: lr (constant), lr (1 − x) (linear), lr (1 + cos πx) / 2 (cosine); 0 beyond `total_steps`.
    """
    if step < spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    if spec.schedule == "constant" or spec.total_steps is None:
        return spec.lr
    x = min(1.0, (step - spec.warmup_steps) / (spec.total_steps - spec.warmup_steps))
    return spec.lr * (1 - x if spec.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2)

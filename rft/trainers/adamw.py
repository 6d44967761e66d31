"""AdamW as every optimizer here is made."""

from typing import Any

import torch

from rft.spec.training import Optimization

MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(parameters: list[Any], spec: Optimization) -> Any:
    """AdamW with its moments there from the start, so that what it takes is known before the first step."""
    optimizer = torch.optim.AdamW(parameters, spec.lr, spec.betas, spec.eps, spec.weight_decay, fused=True)
    for p in parameters:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {"step": step, **{moment: torch.zeros_like(p) for moment in MOMENTS}}
    return optimizer

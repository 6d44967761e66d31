"""The trainers that the contract is of, by name; and what only a look inside one tells."""

from typing import Any

import torch
from torch import Tensor

from rft.spec import DeepSpeedTrainer, FSDP2Trainer, Training

LAUNCHES_OF_FSDP2 = (
    (2, ("fsdp2", "fsdp2, offloaded", "fsdp2, shards=1"), "quick"),
    (1, ("fsdp2", "fsdp2, offloaded"), "slow"),
    (3, ("fsdp2",), "slow"),
    (4, ("fsdp2, shards=2",), "slow"),
)
QUICK_OF_ZERO = (2, ("zero 1", "zero 2", "zero 3", "zero 2, offloaded;five_steps;placement;checkpoints;from_elsewhere"), "quick")
LAUNCHES_OF_ZERO = (
    QUICK_OF_ZERO,
    (2, ("zero 2, offloaded", "zero 3, offloaded"), "slow"),
    (1, ("zero 1", "zero 2", "zero 3", "zero 2, offloaded", "zero 3, offloaded"), "slow"),
)
"""What runs together on how many ranks."""


def specification(backend: str, options: dict[str, Any]) -> Training:
    """The specification of a backend; `keep_gathered` is FSDP2's alone."""
    if backend.startswith("fsdp2"):
        return FSDP2Trainer(shards=shards(backend), offload="offloaded" in backend, **options)
    stage: Any = int(backend.split()[1].strip(","))
    return DeepSpeedTrainer(stage=stage, offload_optimizer="offloaded" in backend, **options)


def shards(backend: str) -> int | None:
    """Ranks that hold a model between them; None: all."""
    return int(backend.partition("shards=")[2] or 0) or None


def gradient(trainer: Any) -> dict[str, Tensor]:
    """That of the first step, whole, if nothing was clipped: AdamW's first moment is then (1 − β₁) times it. Collective."""
    named = {name: p for name, p in trainer._backend.root.model.named_parameters() if p.requires_grad}
    if trainer.name == "fsdp2":
        moments = {name: trainer._backend._optimizer.state[p]["exp_avg"].full_tensor() for name, p in named.items()}
    else:
        from deepspeed.utils import safe_get_full_optimizer_state

        moments = {name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in named.items()}
    return {name: moment.cpu() / 0.1 for name, moment in moments.items()}


def held(trainer: Any) -> list[int]:
    """Bytes that each storage of the weights and their masters, of the moments and lasting gradients has now."""
    return [tensor.untyped_storage().nbytes() for shelf in trainer._backend.shelves.values() for tensor in shelf._tensors]


def masters(trainer: Any) -> set[torch.dtype]:
    """Dtypes of what the optimizer updates."""
    if trainer.name == "fsdp2":
        return {p.dtype for p in trainer._backend._trained}
    from rft.trainers import deepspeed_state

    return {master.dtype for master in deepspeed_state.masters(trainer._backend._optimizer)}

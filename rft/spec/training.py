"""Training backends, as `LaunchSpec` is given them."""

import dataclasses as dc
import math
from typing import Literal, Protocol

from rft.errors import BadInput
from rft.models import ModelFolder
from rft.parallel.world import World
from rft.shapes import check_fields
from rft.spec.checks import at_least_one
from rft.spec.engines import DType
from rft.spec.lora import LoRA
from rft.trainers.protocol import Critic, Trainer


class TrainerSpec(Protocol):
    """Anything that builds a trainer on this rank."""

    def build(self, model: ModelFolder, world: World) -> Trainer:
        """The trainer of the Actor, on the device."""
        ...


class CriticTrainerSpec(Protocol):
    """Anything that builds a critic on this rank; the trainers below build both."""

    def build_critic(self, model: ModelFolder, world: World) -> Critic:
        """A value head on a model of its own, with its optimizer, on the device."""
        ...


@dc.dataclass(frozen=True, kw_only=True)
class Optimization:
    """What every optimizer of ours is told: AdamW, one global clip, and a schedule."""

    lr: float = 1e-6
    """Peak learning rate; 0 is allowed, and moves nothing."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """The gradient's global norm is clipped to this; infinity never clips."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up; linear and cosine reach 0 at `total_steps`."""
    warmup_steps: int = 0
    """Optimizer steps from 0 to the peak."""
    total_steps: int | None = None
    """Optimizer steps of the whole run; linear and cosine need it."""

    def __post_init__(self) -> None:
        check_fields(self)
        numbers = 0 <= self.lr < math.inf and self.eps > 0 and 0 <= self.weight_decay < math.inf and self.max_grad_norm > 0
        if not numbers or self.warmup_steps < 0 or not all(0 <= beta < 1 for beta in self.betas):
            raise BadInput(
                f"lr, weight_decay and warmup_steps must be at least 0, eps and max_grad_norm above 0, betas in [0, 1); got {self}"
            )
        if self.total_steps is not None:
            at_least_one(self, "total_steps")
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise BadInput(
                f"schedule={self.schedule!r} needs total_steps above warmup_steps={self.warmup_steps}, got total_steps={self.total_steps}"
            )


@dc.dataclass(frozen=True, kw_only=True)
class Training(Optimization):
    """What every training backend of ours is told: AdamW over fp32 masters, one global clip, micro-batches by tokens."""

    dtype: DType = "bfloat16"
    """Of the forward and backward pass; masters, moments and gradient reduction are fp32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    micro_batch_tokens: int = 16384
    """Tokens of one forward pass, on each rank: real ones, or where a model's rows must be padded (the log says so) padding too. Of images
    the placeholders count, which stand for four patches each in Qwen2.5-VL."""
    lora: LoRA | None = None
    """Train an adapter of low rank, and leave the model itself alone; None: train all of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "micro_batch_tokens")


@dc.dataclass(frozen=True, kw_only=True)
class FSDP2Trainer(Training):
    """`fully_shard` over all ranks: fp32 masters, AdamW, one global clip."""

    keep_gathered: bool = True
    """Keep parameters gathered over the micro-batches of a step; off, each layer is sharded again after use, to save memory."""

    shards: int | None = None
    """Neighbouring ranks that hold one copy of the model between them, with a replica in every such group; None: all ranks."""
    offload: bool = False
    """Weights, gradients and moments stay on the host, where AdamW runs; each layer comes to the device when it is used."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards is not None:
            at_least_one(self, "shards")

    def build(self, model: ModelFolder, world: World) -> Trainer:
        """Builds it, sharded. Raises `BadInput` where `shards` does not divide the world."""
        from rft.trainers.fsdp2 import build

        return build(self, model, world)

    def build_critic(self, model: ModelFolder, world: World) -> Critic:
        """Builds a critic, as `build` does the Actor."""
        from rft.trainers.fsdp2 import build_critic

        return build_critic(self, model, world)


@dc.dataclass(frozen=True, kw_only=True)
class DeepSpeedTrainer(Training):
    """DeepSpeed's ZeRO over all ranks: weights in the dtype asked for beside fp32 masters, AdamW, one global clip."""

    stage: Literal[1, 2, 3] = 3
    """What is sharded. 1: masters and moments; 2: the gradient too; 3: the weights too."""
    offload_optimizer: bool = False
    """ZeRO-Offload: masters and moments stay on the host, and AdamW runs there."""

    def build(self, model: ModelFolder, world: World) -> Trainer:
        """Builds it, sharded over the whole world. Raises `MissingBackend` with the line that installs DeepSpeed."""
        from rft.trainers.deepspeed import build

        return build(self, model, world)

    def build_critic(self, model: ModelFolder, world: World) -> Critic:
        """Builds a critic, as `build` does the Actor. In bfloat16 the head's weight computes rounded to that; its values are fp32."""
        from rft.trainers.deepspeed import build_critic

        return build_critic(self, model, world)

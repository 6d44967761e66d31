"""What `launch` is given: typed, frozen, and the source of the command line. What cannot work is refused here, with the reason."""

import dataclasses as dc
from typing import Literal, Protocol

from rft.engines.protocol import Engine
from rft.errors import BadInput
from rft.models import ModelFolder
from rft.parallel.world import World
from rft.trainers.protocol import Trainer

DType = Literal["bfloat16", "float32"]


class EngineSpec(Protocol):
    """Anything that builds an engine on this rank: one of the two below, or your own."""

    def build(self, model: ModelFolder, world: World) -> Engine:
        """The engine, awake, with the model's weights or none. Raises `MissingEngine` where it is not installed."""
        ...


class TrainerSpec(Protocol):
    """Anything that builds a trainer on this rank."""

    def build(self, model: ModelFolder, world: World) -> Trainer:
        """The trainer, on the device."""
        ...


@dc.dataclass(frozen=True, kw_only=True)
class TransformersEngine:
    """The embedded default: plain transformers with its own copy of the weights; nothing to install."""

    dtype: DType = "bfloat16"
    """Of the engine's copy of the weights."""
    max_model_len: int = 2048
    """Longest prompt and response together, in tokens."""
    max_rows: int = 64
    """Sequences decoded together."""

    def __post_init__(self) -> None:
        _at_least_one(self, "max_model_len", "max_rows")

    def build(self, model: ModelFolder, world: World) -> Engine:
        """Builds it. TP is refused: this engine holds the whole model on every rank."""
        from rft.engines.transformers import build

        return build(self, model, world)


@dc.dataclass(frozen=True, kw_only=True)
class VLLMEngine:
    """vLLM in the process of its rank, on a CPU or a CUDA device."""

    dtype: DType = "bfloat16"
    """Of the engine's copy of the weights."""
    max_model_len: int = 2048
    """Longest prompt and response together, in tokens."""
    max_rows: int = 256
    """Sequences decoded together."""
    cache_bytes: int = 1 << 30
    """The KV cache on each rank: pinned, never profiled, since the device is shared with the Actor."""
    eager: bool = False
    """Run without CUDA graphs and compilation: a quicker start, slower decoding. (A CPU always does.)"""

    def __post_init__(self) -> None:
        _at_least_one(self, "max_model_len", "max_rows", "cache_bytes")

    def build(self, model: ModelFolder, world: World) -> Engine:
        """Builds it. Raises `MissingEngine` with the line that installs vLLM."""
        from rft.engines.vllm import build

        return build(self, model, world)


@dc.dataclass(frozen=True, kw_only=True)
class Training:
    """What every training backend of ours is told: AdamW over fp32 masters, one global clip, micro-batches by tokens."""

    dtype: DType = "bfloat16"
    """Of the forward and backward pass; masters, moments and gradient reduction are fp32."""
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
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    micro_batch_tokens: int = 16384
    """Tokens of one forward pass, on each rank: real ones, or where a model's rows must be padded (the log says so) padding too."""

    def __post_init__(self) -> None:
        _at_least_one(self, "micro_batch_tokens")
        if self.lr < 0 or self.eps <= 0 or self.weight_decay < 0 or self.max_grad_norm <= 0 or self.warmup_steps < 0:
            raise BadInput(f"lr, weight_decay and warmup_steps must be at least 0, eps and max_grad_norm above 0; got {self}")
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise BadInput(
                f"schedule={self.schedule!r} needs total_steps above warmup_steps={self.warmup_steps}, got total_steps={self.total_steps}"
            )


@dc.dataclass(frozen=True, kw_only=True)
class FSDP2Trainer(Training):
    """`fully_shard` over all ranks: fp32 masters, AdamW, one global clip."""

    keep_gathered: bool = True
    """Keep parameters gathered over the micro-batches of a step; off, each layer is sharded again after use, to save memory."""

    def build(self, model: ModelFolder, world: World) -> Trainer:
        """Builds it, sharded over the whole world."""
        from rft.trainers.fsdp2 import build

        return build(self, model, world)


@dc.dataclass(frozen=True, kw_only=True)
class DeepSpeedTrainer(Training):
    """DeepSpeed's ZeRO over all ranks: weights in the dtype asked for beside fp32 masters, AdamW, one global clip."""

    stage: Literal[1, 2, 3] = 3
    """What is sharded. 1: masters and moments; 2: the gradient too; 3: the weights too."""
    offload_optimizer: bool = False
    """ZeRO-Offload: masters and moments stay on the host, and AdamW runs there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage not in (1, 2, 3):
            raise BadInput(f"DeepSpeedTrainer.stage must be 1, 2 or 3, got {self.stage!r}")

    def build(self, model: ModelFolder, world: World) -> Trainer:
        """Builds it, sharded over the whole world. Raises `MissingBackend` with the line that installs DeepSpeed."""
        from rft.trainers.deepspeed import build

        return build(self, model, world)


@dc.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The whole runtime of one job."""

    model: str
    """A Hugging Face model folder, or a hub id."""
    engine: EngineSpec | None = dc.field(default_factory=TransformersEngine)
    """The rollout engine; None for training without one (the state stays [Asleep, Stale])."""
    trainer: TrainerSpec = dc.field(default_factory=FSDP2Trainer)
    """The training backend."""
    tensor_parallel: int = 1
    """Ranks that share one engine."""
    seed: int = 0
    """Of the run: every sampled token's random number comes from it."""
    deadline_s: float = 600.0
    """How long a rank waits for the others at a step before the job ends with a table of who is where."""
    device_bytes: int | None = None
    """Memory of each device that this job may fill; None asks the driver."""
    probe_every: int = 1
    """Engine and Actor are compared on a short fixed probe after every so many broadcasts; 0: never."""

    def __post_init__(self) -> None:
        _at_least_one(self, "tensor_parallel")
        for name, part in (("engine", self.engine), ("trainer", self.trainer)):
            if part is not None and not hasattr(part, "build"):
                raise BadInput(f"LaunchSpec.{name} must be a specification such as TransformersEngine(), got {part!r}")
        if self.deadline_s <= 0 or self.probe_every < 0 or (self.device_bytes is not None and self.device_bytes < 1):
            raise BadInput("deadline_s must be above 0, probe_every at least 0, device_bytes at least 1 or None")


def _at_least_one(spec: object, *names: str) -> None:
    for name in names:
        if getattr(spec, name) < 1:
            raise BadInput(f"{type(spec).__name__}.{name} must be at least 1, got {getattr(spec, name)}")

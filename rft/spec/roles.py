"""The models beside the Actor, as `LaunchSpec` is given them."""

import dataclasses as dc
from typing import Literal

from rft.errors import BadInput
from rft.models import ModelFolder, find_model
from rft.parallel.world import World
from rft.shapes import check_fields
from rft.spec.checks import at_least_one
from rft.spec.engines import DType
from rft.spec.training import CriticTrainerSpec, FSDP2Trainer, Optimization
from rft.trainers import protocol

Where = Literal["device", "host"]


@dc.dataclass(frozen=True, kw_only=True)
class FrozenSpec:
    """What every model is told that is only asked, never trained."""

    dtype: DType = "bfloat16"
    """Of its weights, and of computing."""
    shards: int | None = None
    """Neighbouring ranks that hold one copy between them; 1: each rank holds all of it. None: all ranks."""
    where: Where = "host"
    """Where it lies after launch."""
    micro_batch_tokens: int = 16384
    """Tokens of one forward pass, on each rank."""

    def __post_init__(self) -> None:
        check_fields(self)
        at_least_one(self, "micro_batch_tokens", *(["shards"] if self.shards is not None else []))


@dc.dataclass(frozen=True, kw_only=True)
class Reference(FrozenSpec):
    """The frozen policy that a KL penalty is measured against.

    Of an Actor with LoRA it is the base model, by the Actor itself with the adapter off, and takes no memory; `model`, `shards` and
    `where` do not apply then, and `launch` refuses them.
    """

    model: str | None = None
    """A model folder or hub id of the Actor's architecture; None: the Actor's own, as it is before training."""

    def build(self, actor: ModelFolder, world: World) -> protocol.Frozen:
        """Builds it, sharded, on the device. Collective. Raises `BadInput` for what is no model of the Actor's kind."""
        from rft.trainers.frozen import build

        return build(self, actor, world)

    def base_of(self, actor: protocol.Adapted) -> protocol.Frozen:
        """That of an Actor with LoRA. Raises `BadInput` where `model`, `shards` or `where` are given."""
        from rft.trainers.frozen import base_of

        return base_of(self, actor)


@dc.dataclass(frozen=True, kw_only=True)
class MovingAverage(FrozenSpec):
    """An exponential moving average of the Actor's weights, by `update_ema`."""

    decay: float = 0.999
    """average <- decay · average + (1 - decay) · Actor."""
    dtype: DType = "float32"
    """Of its weights: in bfloat16 a decay near 1 rounds every change away."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise BadInput(f"MovingAverage.decay must be in [0, 1), got {self.decay}")

    def build(self, actor: ModelFolder, world: World) -> protocol.Frozen:
        """Builds it with the Actor's initial weights, on the device. Collective."""
        from rft.trainers.frozen import build

        return build(self, actor, world)


@dc.dataclass(frozen=True, kw_only=True)
class RewardModel(FrozenSpec):
    """A local reward model: a decoder with one label, saved as a sequence classifier, or as a token classifier that is read at the end.

    With the Actor's own tokenizer it reads the tokens that were sampled; with another it reads question and response as text, in its chat
    template where it has one, which the log says at launch.
    """

    model: str
    """A model folder or hub id."""

    def build(self, actor: ModelFolder, world: World) -> protocol.Judge:
        """Builds it, sharded, on the device. Collective. Raises `BadInput` for a model that does not give one number."""
        from rft.trainers.reward_model import build

        return build(self, actor, world)


@dc.dataclass(frozen=True, kw_only=True)
class Critic:
    """A value head on a model of its own, with its own backend, optimizer and schedule."""

    model: str | None = None
    """A model folder or hub id, with the Actor's tokenizer: a causal LM, whose head is left out for a value head of zeros, or a sequence
    classifier with one label, whose head is the value head then. None: the Actor's own, as it is before training."""
    trainer: CriticTrainerSpec = dc.field(default_factory=FSDP2Trainer)
    """Its training backend; need not be the Actor's."""
    where: Where = "host"
    """Where model and optimizer lie after launch."""

    def __post_init__(self) -> None:
        check_fields(self, but=("trainer",))
        if not hasattr(self.trainer, "build_critic") or isinstance(self.trainer, type):
            raise BadInput(f"Critic.trainer must be a specification such as FSDP2Trainer(), got {self.trainer!r}")
        if getattr(self.trainer, "lora", None) is not None:
            raise BadInput("Critic.trainer.lora must be None: an adapter is the Actor's; a SharedCritic trains little, too")

    def build(self, actor: ModelFolder, world: World) -> protocol.Critic:
        """Builds it, sharded, on the device. Collective. Raises `BadInput` for what cannot be loaded, or has another tokenizer."""
        from rft.trainers.likeness import other_tokens

        own = actor if self.model is None else find_model(self.model)
        if problems := other_tokens(own, actor):
            raise BadInput(f"Critic.model {own.path} is to read the Actor's tokens, and has others: {'; '.join(problems)}")
        return self.trainer.build_critic(own, world)


@dc.dataclass(frozen=True, kw_only=True)
class SharedCritic(Optimization):
    """A value head on the Actor's hidden states, which it reads and never moves; with its own optimizer and schedule."""

    lr: float = 1e-4
    """Peak learning rate of the head."""

    def build(self, actor: protocol.Trainer, world: World) -> protocol.Critic:
        """Builds the head on the hidden states of `actor`. Collective. Raises `BadInput` for a trainer that does not give them."""
        from rft.trainers.shared_critic import build

        return build(self, actor, world)

"""What a step of a run adds to what is on the device already, from the same numbers as the plan. Of backends not ours nothing is known."""

import functools
from typing import Any, TypeGuard

from rft.memory.activations import bounded
from rft.memory.outline import Blueprint, Head, blueprint, read_config
from rft.memory.sharding import shards_of
from rft.memory.steps import Rows, Work, asking, scoring, training
from rft.spec import DeepSpeedTrainer, FrozenSpec, FSDP2Trainer, LaunchSpec, Reference, RewardModel, SharedCritic
from rft.spec.training import Training


def work_of(mask: Any, device: str) -> Work:
    """The rows that a mask `[batch, seq]` marks."""
    lengths = mask.sum(dim=1)
    tokens, longest = max(int(lengths.sum()), 1), max(int(lengths.max()) if len(lengths) else 1, 1)
    return Work(tokens=tokens, wanted=tokens, longest=longest, device=device, measure=bounded)


def to_score(launch: LaunchSpec, config: Any, work: Work, ranks: int) -> Rows:
    """Log-probs of the rows by the Actor, whose configuration this is."""
    return _pass(_actor(launch, config), launch.trainer, work, ranks)


def to_train(launch: LaunchSpec, config: Any, work: Work, ranks: int) -> Rows:
    """An optimizer step of the Actor."""
    return _step(_actor(launch, config), launch.trainer, work, ranks)


def to_ask(spec: FrozenSpec, config: Any, work: Work, ranks: int) -> Rows:
    """Log-probs by a frozen model of the Actor's kind, or scores by a reward model."""
    named = spec.model if isinstance(spec, Reference | RewardModel) else None
    of = _of(named, config, "reward" if isinstance(spec, RewardModel) else "language")
    return asking(of, spec.dtype, spec.micro_batch_tokens, work, shards_of(spec.shards, ranks))


def to_value(launch: LaunchSpec, config: Any, work: Work, ranks: int) -> Rows:
    """Values by the Critic, on a model of its own or on the Actor's hidden states."""
    spec = launch.critic
    if spec is None or isinstance(spec, SharedCritic):
        return _pass(_actor(launch, config), launch.trainer, work, ranks, read=blueprint(config, "value"))
    return _pass(_of(spec.model, config, "value"), spec.trainer, work, ranks)


def to_train_critic(launch: LaunchSpec, config: Any, work: Work, ranks: int) -> Rows:
    """An optimizer step of the Critic; a head on the Actor's hidden states has no more gradient than itself."""
    spec = launch.critic
    if spec is None or isinstance(spec, SharedCritic):
        return to_value(launch, config, work, ranks)
    return _step(_of(spec.model, config, "value"), spec.trainer, work, ranks)


def _pass(of: Blueprint, trainer: object, work: Work, ranks: int, *, read: Blueprint | None = None) -> Rows:
    return scoring(of, trainer, work, ranks, read=read) if _known(trainer) else {}


def _step(of: Blueprint, trainer: object, work: Work, ranks: int) -> Rows:
    return max(training(of, trainer, work, ranks), key=lambda rows: sum(rows.values())) if _known(trainer) else {}


def _known(trainer: object) -> TypeGuard[Training]:
    return isinstance(trainer, FSDP2Trainer) or (isinstance(trainer, DeepSpeedTrainer) and trainer.lora is None)


def _actor(launch: LaunchSpec, config: Any) -> Blueprint:
    trainer: object = launch.trainer
    return blueprint(config, lora=trainer.lora if isinstance(trainer, Training) else None)


def _of(named: str | None, actor: Any, head: Head) -> Blueprint:
    return blueprint(actor if named is None else _config(named), head)


@functools.lru_cache(maxsize=16)
def _config(model: str) -> Any:
    return read_config(model)

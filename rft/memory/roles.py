"""The models of a job by name: what each takes when it is on the device, and what its use adds."""

import dataclasses as dc

from rft.memory.engines import EngineHolds, engine_holds
from rft.memory.outline import Blueprint, blueprint, outline, read_config
from rft.memory.setting import Setting
from rft.memory.sharding import FP32, MOMENTS, Held, frozen, held, ours, shards_of
from rft.memory.steps import Rows, asking, scoring, training
from rft.models import reward_kind
from rft.spec import Critic, FrozenSpec, LaunchSpec
from rft.spec.training import Training


@dc.dataclass(frozen=True, kw_only=True)
class Model:
    """A role: bytes on the device by row, where it waits, and what computing with it adds at each moment that may be the fullest."""

    holds: Rows
    where: str
    host: int
    """Bytes on the host for good, wherever the role is."""
    used: list[Rows]


def actor_blueprint(launch: LaunchSpec) -> Blueprint:
    """The Actor's, adapted if it is trained so. Raises `BadInput` for a model that is not found."""
    return blueprint(read_config(launch.model), lora=trainer_of(launch).lora)


def actor_holds(setting: Setting, of: Blueprint) -> Held:
    """Its weights and moments."""
    return held(outline(of), trainer_of(setting.launch), setting.world_size)


def trainer_of(launch: LaunchSpec) -> Training:
    """The Actor's trainer. Raises `BadInput` for one that is none of ours."""
    return ours(launch.trainer)


def engine(setting: Setting, of: Blueprint) -> EngineHolds | None:
    """The rollout engine; None for a launch without one."""
    launch = setting.launch
    if launch.engine is None:
        return None
    rows = setting.prompts * setting.samples * launch.tensor_parallel
    lengths = {"longest_prompt": setting.longest_prompt, "longest": setting.longest}
    return engine_holds(launch.engine, blueprint(of.config), launch.tensor_parallel, rows=rows, **lengths)


def reference(setting: Setting, actor: Blueprint) -> Model | None:
    """The frozen Reference."""
    spec = setting.launch.reference
    if spec is None:
        return None
    if actor.lora is not None:  # the Actor without its adapter
        used = scoring(actor, trainer_of(setting.launch), setting.work(), setting.world_size)
        return Model(holds={}, where="device", host=0, used=[used])
    return _asked("reference", spec, actor if spec.model is None else blueprint(read_config(spec.model)), setting)


def ema(setting: Setting, actor: Blueprint) -> Model | None:
    """The average of the Actor: it is mixed with the Actor's stream, a tensor at a time, and computes nothing."""
    spec = setting.launch.ema
    if spec is None:
        return None
    size = frozen(outline(blueprint(actor.config)), spec.dtype, spec.shards, setting.world_size)
    return Model(holds={"ema weights": size}, where=spec.where, host=size if spec.where == "host" else 0, used=[{}])


def reward_models(setting: Setting) -> dict[str, Model]:
    """Local reward models by name."""
    launch = setting.launch
    return {name: _asked(f"reward model {name}", spec, _judge(spec.model), setting) for name, spec in launch.reward_models.items()}


def _judge(model: str) -> Blueprint:
    config = read_config(model)
    _ = reward_kind(config, model)
    return blueprint(config, "reward")


def critic(setting: Setting, actor: Blueprint) -> Model | None:
    """The Critic on a model of its own, or the head on what the Actor makes of a row."""
    spec = setting.launch.critic
    if spec is None:
        return None
    if isinstance(spec, Critic):
        return _own_critic(spec, setting, actor)
    width = int(actor.config.get_text_config().hidden_size)
    head = {"critic weights": FP32 * width, "critic optimizer": MOMENTS * FP32 * width}
    read = blueprint(actor.config, "value")
    used = scoring(actor, trainer_of(setting.launch), setting.work(), setting.world_size, read=read)
    return Model(holds=head, where="device", host=0, used=[used])


def _own_critic(spec: Critic, setting: Setting, actor: Blueprint) -> Model:
    of = blueprint(actor.config if spec.model is None else read_config(spec.model), "value")
    trainer = ours(spec.trainer)
    parts = held(outline(of), trainer, setting.world_size)
    moves = spec.where == "host"
    return Model(
        holds={"critic weights": parts.weights, "critic optimizer": parts.optimizer},
        where=spec.where,
        host=parts.host + moves * (parts.weights + parts.optimizer),
        used=[
            scoring(of, trainer, setting.work(), setting.world_size),
            *training(of, trainer, setting.work(setting.minibatches), setting.world_size),
        ],
    )


def _asked(name: str, spec: FrozenSpec, of: Blueprint, setting: Setting) -> Model:
    size = frozen(outline(of), spec.dtype, spec.shards, setting.world_size)
    used = asking(of, spec.dtype, spec.micro_batch_tokens, setting.work(), shards_of(spec.shards, setting.world_size))
    return Model(holds={f"{name} weights": size}, where=spec.where, host=size if spec.where == "host" else 0, used=[used])

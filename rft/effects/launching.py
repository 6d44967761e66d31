"""Opening and closing of the devices of one job."""

import contextlib
import logging
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from rft.effects.alike import require_same_models
from rft.effects.runtime import Beside, Runtime
from rft.engines.protocol import Engine
from rft.errors import BadInput
from rft.models import ModelFolder, find_folder, find_model
from rft.parallel.lockstep import Lockstep
from rft.parallel.world import World, open_world, quick_dtype
from rft.shapes import require_kind
from rft.spec import Critic, LaunchSpec, MovingAverage, Reference, SharedCritic, Where
from rft.state import ACTOR_OPTIMIZER, CRITIC, CRITIC_OPTIMIZER, EMA, REFERENCE, Placement, Role, Roles, reward_model
from rft.telemetry.records import flat
from rft.trainers.protocol import Adapted, Frozen, Judge, Trainer

log = logging.getLogger("rft")
T = TypeVar("T")


@contextlib.contextmanager
def opened(spec: LaunchSpec) -> Generator[Runtime]:
    """Everything that a launch owns, given back in reverse order however it is left.

    The engine comes first, so that its memory is measured alone; it sleeps before the trainer is built.
    """
    require_kind("launch(spec)", "spec", spec, LaunchSpec)
    with contextlib.ExitStack() as stack:
        joined = dist.is_initialized()
        world = open_world(spec.tensor_parallel, timeout_s=spec.deadline_s)
        lockstep = Lockstep(world, spec.deadline_s)
        stack.enter_context(lockstep.watched())  # the leaving of the world too, which can hang like any collective
        if not joined:
            _ = stack.callback(_leave_world)
        _require_alike(spec, lockstep)
        spec.check_shards(world.size)
        _warn_of_slowness(spec, world)
        model = _built(lockstep, lambda: _found(spec))  # a node may lack what the others have
        if world.size > 1:
            require_same_models(_built(lockstep, lambda: _folders(spec)), lockstep)
        engine = None
        if spec.engine is not None:
            engine = _built(lockstep, partial(_engine, spec, spec.engine, model, world))
            _ = stack.callback(engine.close)
            engine.sleep("release")
            memory = engine.memory()
            log.info("engine %s: weights %.1f MiB, cache %.1f MiB when awake", engine.name, memory.weights / 2**20, memory.cache / 2**20)
        trainer = _built(lockstep, lambda: spec.trainer.build(model, world))
        _ = stack.callback(trainer.close)
        beside = _beside(spec, model, world, trainer, lockstep, stack)
        _ = stack.push(lockstep.close)
        narrows = lockstep.gather({} if engine is None else dict(engine.narrows))
        yield Runtime(
            spec=spec, model=model, world=world, trainer=trainer, engine=engine, lockstep=lockstep, beside=beside, narrows=narrows
        )


def _found(spec: LaunchSpec) -> ModelFolder:
    """The Actor's model. Raises `BadInput` for what cannot stand beside one that takes images."""
    model = find_model(spec.model)
    if model.images is None:
        return model
    blind = ["critic"] * (spec.critic is not None) + ["reward_models"] * bool(spec.reward_models)
    adapted = ["trainer.lora"] * (getattr(spec.trainer, "lora", None) is not None)
    if blind or adapted:
        raise BadInput(
            f"LaunchSpec.{', '.join([*blind, *adapted])} cannot be used with {model.path}, a model that takes images: Critics and local "
            "reward models read text alone, and adapters are for models of text; leave them out, or take a model of text"
        )
    log.info("%s takes images: what computing takes on the device is not counted before a step", model.path)
    return model


def _folders(spec: LaunchSpec) -> dict[str, Path]:
    """Where the models lie that are named, and the adapter to begin with, by field."""
    named = {"model": spec.model} | {f"{role}.model": getattr(getattr(spec, role), "model", None) for role in ("reference", "critic")}
    named |= {f"reward_models[{name!r}].model": judge.model for name, judge in spec.reward_models.items()}
    folders = {name: find_folder(model) for name, model in named.items() if model is not None}
    adapter = getattr(getattr(spec.trainer, "lora", None), "adapter", None)
    return folders if adapter is None else folders | {"trainer.lora.adapter": Path(adapter).expanduser()}


def _engine(spec: LaunchSpec, engine: Any, model: ModelFolder, world: World) -> Engine:
    """The engine; with a place for an adapter where the trainer has one that is sent alone."""
    lora = spec.adapter_alone
    return engine.build(model, world) if lora is None else engine.build_adapted(model, world, lora)


def _require_alike(spec: LaunchSpec, lockstep: Lockstep) -> None:
    """Raises `BadInput` where the ranks were given different specifications. Collective.

    Of a folder it is compared whether one is named, as they may have other names on other nodes; not, what has no text of its own.
    """
    folders = ("model", "adapter")
    named = {name: "a folder" if name.endswith(folders) and value is not None else value for name, value in flat(spec).items()}
    plain = {name: value for name, value in named.items() if " at 0x" not in str(value)}
    told = lockstep.gather(plain)
    for rank, theirs in enumerate(told):
        for name in sorted(told[0].keys() | theirs.keys()):
            if told[0].get(name) != theirs.get(name):
                raise BadInput(
                    f"LaunchSpec.{name} is {told[0].get(name)} on rank 0 and {theirs.get(name)} on rank {rank}; give every rank the same"
                )


def _warn_of_slowness(spec: LaunchSpec, world: World) -> None:
    slow = [name for name, value in flat(spec).items() if name.endswith("dtype") and value == "bfloat16"]
    if slow and world.rank == 0 and quick_dtype() == "float32":
        log.warning(
            "this processor has no instructions for bfloat16, and takes many times as long in it as in float32: %s; write dtype='float32'",
            ", ".join(slow),
        )


def roles(runtime: Runtime) -> Roles:
    """Where everything beside the Actor's weights and the engine lies after launch."""
    spec, beside = runtime.spec, runtime.beside
    where: dict[Role, Where] = {ACTOR_OPTIMIZER: "device"}
    where |= {role: wanted.where for role, wanted in _frozen(spec).items()}
    where |= {reward_model(name): wanted.where for name, wanted in sorted(spec.reward_models.items())}
    if beside.critic is not None and isinstance(spec.critic, Critic):
        where |= dict.fromkeys((CRITIC, CRITIC_OPTIMIZER), spec.critic.where)
    elif beside.critic is not None:
        where |= dict.fromkeys((CRITIC, CRITIC_OPTIMIZER), "device")
    where |= dict.fromkeys(beside.by_actor, "device")
    return Roles(tuple(Placement(role, there, runtime.movable[role].bytes) for role, there in where.items()))


def _beside(
    spec: LaunchSpec, model: ModelFolder, world: World, trainer: Trainer, lockstep: Lockstep, stack: contextlib.ExitStack
) -> Beside:
    """The models beside the Actor, one after the other; each goes to the host at once if that is where it is to lie."""
    frozen, judges, by_actor = dict[Role, Frozen](), dict[Role, Judge](), set[Role]()
    for role, wanted in _frozen(spec).items():
        if isinstance(wanted, Reference) and isinstance(trainer, Adapted):
            frozen[role] = _built(lockstep, partial(wanted.base_of, trainer))
            by_actor |= {role}
            continue
        frozen[role] = _built(lockstep, partial(wanted.build, model, world))
        _settled(frozen[role], wanted.where, stack)
    for name, wanted in sorted(spec.reward_models.items()):  # in one order on all ranks, who build each together
        judges[reward_model(name)] = judge = _built(lockstep, partial(wanted.build, model, world))
        _settled(judge, wanted.where, stack)
    critic = None
    if isinstance(spec.critic, SharedCritic):
        critic = _built(lockstep, partial(spec.critic.build, trainer, world))
        by_actor |= {CRITIC}
        _ = stack.callback(critic.close)
    elif spec.critic is not None:
        critic = _built(lockstep, partial(spec.critic.build, model, world))
        _ = stack.callback(critic.close)
        if spec.critic.where == "host":
            critic.offload("model")
            critic.offload("optimizer")
    return Beside(frozen=frozen, judges=judges, critic=critic, by_actor=frozenset(by_actor))


def _frozen(spec: LaunchSpec) -> dict[Role, Reference | MovingAverage]:
    wanted = {REFERENCE: spec.reference, EMA: spec.ema}
    return {role: each for role, each in wanted.items() if each is not None}


def _settled(model: Frozen | Judge, where: Where, stack: contextlib.ExitStack) -> None:
    _ = stack.callback(model.close)
    if where == "host":
        model.offload()


def _leave_world() -> None:
    if dist.is_initialized():  # an engine that is closed may have taken the world with it
        dist.destroy_process_group()


def _built(lockstep: Lockstep, build: Callable[[], T]) -> T:
    """What `build` gives, if it went well on every rank."""
    built, failure = None, None
    try:
        built = build()
    except Exception as error:  # noqa: BLE001 (it is raised again by `agree`, on this rank as itself)
        failure = error
    lockstep.agree(failure)
    assert built is not None
    return built

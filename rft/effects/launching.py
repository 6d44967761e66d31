"""Opening and closing of the devices of one job."""

import contextlib
import logging
from collections.abc import Callable, Generator
from typing import TypeVar

import torch.distributed as dist

from rft.effects.runtime import Runtime
from rft.models import find_model
from rft.parallel.last_words import last_words
from rft.parallel.lockstep import Lockstep
from rft.parallel.world import open_world
from rft.spec import LaunchSpec

log = logging.getLogger("rft")
T = TypeVar("T")


@contextlib.contextmanager
def opened(spec: LaunchSpec) -> Generator[Runtime]:
    """Everything that a launch owns, given back in reverse order however it is left.

    The engine comes first, so that its memory is measured alone; it sleeps before the trainer is built.
    """
    model = find_model(spec.model)
    with contextlib.ExitStack() as stack:
        joined = dist.is_initialized()
        world = open_world(spec.tensor_parallel, timeout_s=spec.deadline_s)
        if not joined:
            _ = stack.callback(_leave_world)
        lockstep = Lockstep(world, spec.deadline_s)
        stack.enter_context(last_words(lockstep.table))
        engine = None
        if spec.engine is not None:
            build = spec.engine.build
            engine = _built(lockstep, lambda: build(model, world))
            _ = stack.callback(engine.close)
            engine.sleep("release")
            memory = engine.memory()
            log.info("engine %s: weights %.1f MiB, cache %.1f MiB when awake", engine.name, memory.weights / 2**20, memory.cache / 2**20)
        trainer = _built(lockstep, lambda: spec.trainer.build(model, world))
        _ = stack.callback(trainer.close)
        yield Runtime(spec=spec, model=model, world=world, trainer=trainer, engine=engine, lockstep=lockstep)


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

"""The broadcast: the Actor's weights into the engine, as a transaction.

    manifest agreed on all ranks → stream → finish loading once → checksums agree on all ranks → caches dropped → commit

Until the manifest is agreed nothing has been touched. From then on a failure on any rank poisons the engine on all of them.
"""

import dataclasses as dc
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rft.effects.budget import require_room, sync_bucket
from rft.effects.runtime import Runtime, runtime_of
from rft.engines.protocol import AdapterEngine
from rft.errors import SyncFailed
from rft.narrow import UNCUT, Narrows, shape_in
from rft.state import Awake, Fresh, OnDevice, RuntimeState
from rft.trainers.protocol import Adapted, Sending, TensorSpec


@dc.dataclass(frozen=True, kw_only=True)
class _Delivery:
    """What is sent, and what takes it."""

    sent: Sending
    load: Callable[[Iterator[tuple[str, Tensor]]], Mapping[str, int]]
    checksums: Callable[[], Mapping[str, int]]
    narrows: Narrows


def broadcast(state: RuntimeState[Any, Any, Any, Any]) -> Fresh:
    """Installs the Actor's weights of the state's version; an offloaded Actor streams from the host."""
    runtime = runtime_of(state)
    deliveries = _deliveries(runtime)
    _require_agreement(runtime, deliveries)
    _require_room(state, runtime)
    awake = type(state.engine) is Awake
    with runtime.engine_effect():
        # Each of these may be collective, over the ranks of an engine or over all: none is begun where another rank has failed.
        with runtime.lockstep.agreement():
            runtime.engine.wake_weights()
        for each in deliveries:
            with runtime.lockstep.agreement():
                received = _loaded(each)
            with runtime.lockstep.agreement():
                _compare(received, each.checksums())
        with runtime.lockstep.agreement():
            runtime.engine.flush()
            if awake:
                runtime.watch.ask_engine(runtime.engine, state.version)
        if awake and type(state.actor) is OnDevice:
            runtime.watch.ask_actor(runtime.trainer, state.version, "broadcast")
    return Fresh(state.version)


def _deliveries(runtime: Runtime) -> list[_Delivery]:
    """All weights; or, for an engine that holds an adapter apart from its base, the adapter, after the base where that is gone."""
    engine, trainer, dtype = runtime.engine, runtime.trainer, runtime.engine.casts_to
    if not isinstance(engine, AdapterEngine):
        whole = Sending(manifest=trainer.manifest(dtype), tensors=trainer.stream_weights(dtype, runtime.narrows))
        own = runtime.narrows[runtime.world.rank] if runtime.narrows else UNCUT
        return [_Delivery(sent=whole, load=engine.load, checksums=engine.checksums, narrows=own)]
    assert isinstance(trainer, Adapted)
    adapter = _Delivery(sent=trainer.adapter(), load=engine.load_adapter, checksums=engine.adapter_checksums, narrows=UNCUT)
    base = [] if engine.has_base else [_Delivery(sent=trainer.base(dtype), load=engine.load, checksums=engine.checksums, narrows=UNCUT)]
    return [*base, adapter]


def _require_agreement(runtime: Runtime, deliveries: Sequence[_Delivery]) -> None:
    """Raises `SyncFailed` before anything is touched, where this rank would send something else than another."""
    digests = runtime.lockstep.gather([_digest(each.sent.manifest) for each in deliveries])
    if any(digest != digests[0] for digest in digests):
        raise SyncFailed(f"broadcast(state): the ranks would send different tensors (manifests {digests}); nothing was touched")


@functools.lru_cache(maxsize=8)
def _digest(manifest: tuple[TensorSpec, ...]) -> str:
    return hashlib.sha256(repr(manifest).encode()).hexdigest()


def _require_room(state: RuntimeState[Any, Any, Any, Any], runtime: Runtime) -> None:
    memory = runtime.engine.memory()
    missing = max(memory.weights - memory.mapped, 0)
    adding = {"sync bucket": sync_bucket(runtime) + memory.bucket} | ({"engine weights": missing} if missing else {})
    require_room("broadcast(state)", state, adding)


def _loaded(delivery: _Delivery) -> Mapping[str, int]:
    """What the engine received. Its stream is exhausted in any case: other ranks take part in it."""
    stream = _as_promised(delivery.sent, delivery.narrows)
    try:
        return delivery.load(stream)
    finally:
        for _ in stream:
            pass


def _as_promised(sent: Sending, narrows: Narrows) -> Iterator[tuple[str, Tensor]]:
    """The stream, held against the manifest, and what is taken here. It goes on to its end whatever is wrong with it."""
    problem = None
    promised = iter(sent.manifest)
    for name, tensor in sent.tensors:
        spec = next(promised, None)
        expected = spec and (spec.name, shape_in(narrows, spec.name, spec.shape), spec.dtype)
        if problem is None and expected != (name, tensor.shape, tensor.dtype):
            problem = f"{name} {tuple(tensor.shape)} {tensor.dtype} was streamed where the manifest has {expected}"
        if problem is None:
            yield name, tensor
        del tensor  # the reader may have let go of it, and the next one needs memory
    missing = next(promised, None)
    if problem or missing:
        raise SyncFailed(f"broadcast(state): {problem or f'the stream ended before {missing}'}")


def _compare(received: Mapping[str, int], held: Mapping[str, int]) -> None:
    if not received:
        raise SyncFailed("broadcast(state): the engine gave no checksums of what it received, so that nothing can be compared")
    names = received.keys() | held.keys()
    wrong = sorted(name for name in names if received.get(name) != held.get(name))
    if wrong:
        raise SyncFailed(
            f"broadcast(state): the engine does not hold what it was sent: checksums differ for {len(wrong)} of {len(names)} tensors, "
            f"{', '.join(wrong[:3])}"
        )

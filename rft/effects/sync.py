"""The broadcast: the Actor's weights into the engine, as a transaction.

    manifest agreed on all ranks → stream → finish loading once → checksums agree on all ranks → caches dropped → commit

Until the manifest is agreed nothing has been touched. From then on a failure on any rank poisons the engine on all of them.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from rft.effects.budget import require_room, sync_bucket
from rft.effects.runtime import Runtime, runtime_of
from rft.errors import SyncFailed
from rft.state import Awake, Fresh, OnDevice, RuntimeState
from rft.trainers.protocol import TensorSpec


def broadcast(state: RuntimeState[Any, Any, Any, Any]) -> Fresh:
    """Installs the Actor's weights of the state's version; an offloaded Actor streams from the host."""
    runtime = runtime_of(state)
    manifest = _agreed_manifest(runtime)
    _require_room(state, runtime)
    awake = type(state.engine) is Awake
    with runtime.engine_effect():
        runtime.engine.wake_weights()
        received = runtime.engine.load(_as_promised(runtime.trainer.stream_weights(), manifest))
        _compare(received, runtime.engine.checksums())
        runtime.engine.flush()
        if awake:
            runtime.watch.ask_engine(runtime.engine, state.version)
        if awake and type(state.actor) is OnDevice:
            runtime.watch.ask_actor(runtime.trainer, state.version, "broadcast")
    return Fresh(state.version)


def _agreed_manifest(runtime: Runtime) -> tuple[TensorSpec, ...]:
    """This rank's manifest, if it is that of all ranks. Raises `SyncFailed` before anything is touched."""
    manifest = runtime.trainer.manifest()
    digest = hashlib.sha256(repr(manifest).encode()).hexdigest()
    digests = runtime.lockstep.gather(digest)
    if len(set(digests)) > 1:
        raise SyncFailed(f"broadcast(state): the ranks would send different tensors (manifests {digests}); nothing was touched")
    return manifest


def _require_room(state: RuntimeState[Any, Any, Any, Any], runtime: Runtime) -> None:
    memory = runtime.engine.memory()
    missing = max(memory.weights - memory.mapped, 0)
    adding = {"sync bucket": sync_bucket(runtime)} | ({"engine weights": missing} if missing else {})
    require_room("broadcast(state)", state, adding)


def _as_promised(stream: Iterator[tuple[str, Tensor]], manifest: tuple[TensorSpec, ...]) -> Iterator[tuple[str, Tensor]]:
    """The stream, held against the manifest. It is exhausted in any case, since it contains collectives."""
    problem = None
    promised = iter(manifest)
    for name, tensor in stream:
        spec = next(promised, None)
        if problem is None and (spec is None or (spec.name, spec.shape, spec.dtype) != (name, tuple(tensor.shape), tensor.dtype)):
            problem = f"{name} {tuple(tensor.shape)} {tensor.dtype} was streamed where the manifest has {spec}"
        if problem is None:
            yield name, tensor
    missing = next(promised, None)
    if problem or missing:
        raise SyncFailed(f"broadcast(state): {problem or f'the stream ended before {missing}'}")


def _compare(received: Mapping[str, int], held: Mapping[str, int]) -> None:
    wrong = sorted(name for name in received.keys() | held.keys() if received.get(name) != held.get(name))
    if wrong:
        raise SyncFailed(
            f"broadcast(state): the engine does not hold what it was sent: checksums differ for {len(wrong)} of {len(received)} tensors, "
            f"{', '.join(wrong[:3])}"
        )

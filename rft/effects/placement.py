"""Waking and sleeping of the engine; host and device for the Actor and the other roles."""

from typing import Any

from rft.effects.budget import needed_to_probe, require_room
from rft.effects.runtime import Runtime, runtime_of
from rft.engines.protocol import Keeping
from rft.errors import RoleError
from rft.state import Asleep, Awake, Fresh, Offloaded, OnDevice, Role, Roles, RuntimeState, spelled


def wake(state: RuntimeState[Any, Fresh, Any, Any]) -> Awake:
    """Maps the cache, and the weights where a keeping sleep took them to the host; then the watch looks."""
    runtime = runtime_of(state)
    memory = runtime.engine.memory()
    missing = max(memory.weights - memory.mapped, 0)
    coming = {"engine cache": memory.cache, **({"engine weights": missing} if missing else {})}
    require_room("wake(state)", state, {**coming, **needed_to_probe(state)})
    with runtime.engine_effect():
        # Each may be collective, over the ranks of an engine or over all: none is begun where another rank has failed.
        for wakes in (runtime.engine.wake_weights, runtime.engine.wake_cache):
            with runtime.lockstep.agreement():
                wakes()
        with runtime.lockstep.agreement():
            runtime.watch.ask_engine(runtime.engine, state.weights.version)
        if type(state.actor) is OnDevice:
            runtime.watch.ask_actor(runtime.trainer, state.version, "wake")
    return Awake()


def sleep(state: RuntimeState[Any, Any, Any, Any], weights: Keeping) -> Asleep:
    """Unmaps the cache, and lets the weights go or keeps them."""
    runtime = runtime_of(state)
    with runtime.engine_effect():
        runtime.engine.sleep(weights)
    return Asleep()


def recover(state: RuntimeState[Any, Any, Any, Any]) -> Asleep:
    """Brings the engine to rest after a failure; its weights and cache are gone, and all ranks agree that they are."""
    runtime = runtime_of(state)
    with runtime.engine_effect():
        runtime.engine.sleep("release")
    return Asleep()


def offload_actor(state: RuntimeState[Any, Any, Any, Any]) -> Offloaded:
    """Device to host; what it frees goes back to the driver."""
    runtime = runtime_of(state)
    with runtime.ledger.irreversible("runtime"):
        runtime.trainer.offload("model")
    return Offloaded()


def reload_actor(state: RuntimeState[Any, Any, Any, Any]) -> OnDevice:
    """Host to device, if it fits; then the watch looks, where the engine woke while the Actor was away."""
    runtime = runtime_of(state)
    require_room("reload_actor(state)", state, {"actor": runtime.trainer.bytes("model")})
    with runtime.ledger.irreversible("runtime"):
        with runtime.lockstep.agreement():
            runtime.trainer.reload("model")
        runtime.watch.ask_actor(runtime.trainer, state.version, "reload_actor")
    return OnDevice()


def offload(state: RuntimeState[Any, Any, Any, Any], role: Role) -> Roles:
    """Another role, device to host. Raises `RoleError` where it is not there, or on the host already."""
    _require_at("offload", state, role, "device")
    runtime = runtime_of(state)
    with runtime.ledger.irreversible("runtime"):
        runtime.movable[role].offload()
    return state.roles.moved(role, "host")


def reload(state: RuntimeState[Any, Any, Any, Any], role: Role) -> Roles:
    """Another role, host to device. Raises `RoleError` where it is not there, or on the device already; `DoesNotFit`."""
    _require_at("reload", state, role, "host")
    runtime = runtime_of(state)
    _require_turn(runtime, state, role)
    require_room(f"reload(state, {spelled(role)})", state, {role: state.roles.of(role).bytes})
    with runtime.ledger.irreversible("runtime"):
        runtime.movable[role].reload()
    return state.roles.moved(role, "device")


def _require_turn(runtime: Runtime, state: RuntimeState[Any, Any, Any, Any], role: Role) -> None:
    """Raises `RoleError` where as many reward models are on the device as may be."""
    there = [other for other in runtime.beside.judges if state.roles.of(other).where == "device"]
    most = runtime.spec.reward_models_on_device
    if role in runtime.beside.judges and len(there) >= most:
        raise RoleError(
            f"reload(state, {spelled(role)}): {', '.join(map(spelled, there))} is on the device, and reward_models_on_device={most}; "
            "offload it first (`use` does), or raise LaunchSpec.reward_models_on_device"
        )


def _require_at(call: str, state: RuntimeState[Any, Any, Any, Any], role: Role, where: str) -> None:
    if role == "actor":
        raise RoleError(f"{call}(state, 'actor'): the Actor is no role but an axis; write instead: state = {call}_actor(state)")
    placement = state.roles.of(role)
    if role in runtime_of(state).beside.by_actor and not placement.bytes:
        raise RoleError(f"{call}(state, {spelled(role)}): it is computed by the Actor and has no memory of its own; move the Actor instead")
    if placement.where != where:
        other = "reload" if call == "offload" else "offload"
        raise RoleError(f"{call}(state, {spelled(role)}): it is on the {placement.where} already; leave it out, or {other} it first")

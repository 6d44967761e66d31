"""Whether a step may be taken, said before anything is touched; a refusal says which line to write instead."""

from rft.errors import IllegalStep
from rft.ledger.table import TABLE, AnyState, Edge, Kind, describe, joint_of, names, needs, route, written
from rft.state import AXES, Devices, RuntimeState


def admit(edge: Edge, state: AnyState, chosen: str) -> Devices:
    """Everything that must hold before the body runs, for a call that made these choices; the module's head has the order."""
    if type(state) is not RuntimeState:
        raise IllegalStep(f"{edge.name}(state) needs a RuntimeState, got {type(state).__name__}")
    devices, (engine, weights, actor, old) = state.devices, edge.before
    devices.ledger.admit(edge, state)
    if edge.name in devices.cannot:
        raise IllegalStep(f"{edge.name}(state): {devices.cannot[edge.name]}\n{_legal_now(state)}")
    if not (type(state.engine) in engine and type(state.weights) in weights and type(state.actor) in actor and type(state.old) in old):
        raise IllegalStep(_refusal(edge, state))
    devices.enter(edge.name, chosen, devices.ledger.generation)
    return devices


def legal(state: AnyState) -> tuple[str, ...]:
    """Names of the steps that `state` may take next: `restore` alone for one that is used up, or where the runtime is poisoned.

    With a poisoned engine `recover` leads on, too; for a copy, or after `launch`, nothing does. It reads the axes, what this runtime's
    backends can do, and which models it has; where these lie, batches and memory are checked by the steps themselves. Raises
    `IllegalStep` for what is no state.
    """
    _require_state("legal(state)", state)
    ledger = state.devices.ledger
    if not ledger.lived(state):
        return ()
    kinds: tuple[Kind, ...] = ("transition", "recovery", "restoration", "observation")
    if ledger.living() is not state or ledger.fault() == "runtime":
        kinds = ("restoration",)
    elif ledger.fault() == "engine":
        kinds = ("recovery", "restoration")
    joint, never = joint_of(state), {*state.devices.cannot, *state.devices.lacking}
    return tuple(e.name for e in TABLE.values() if e.kind in kinds and e.allows(joint) and e.name not in never)


def living(state: AnyState, /) -> RuntimeState:
    """The newest state of the runtime of `state`, which may be any that lived: for where the one that was returned last is lost.

    A composition such as `use` or `update` uses up the state that it is given, and one that fails half-way returns nothing. Go on from
    what it had reached:

        except rft.NonFiniteGradient:
            reached = rft.living(state)
            if not rft.is_at(reached, Asleep, Stale, OnDevice, OldLogProbs):
                raise
            state = rft.finish_batch(reached)

    No step, and not collective: it looks at this rank alone. What is poisoned stays so, and the next step says what leads on. Raises
    `ConsumedState` for a state that never lived, such as a copy, and `RuntimeClosed` once `launch` has been left.
    """
    _require_state("living(state)", state)
    return state.devices.ledger.newest(state)


def _require_state(call: str, state: object) -> None:
    if type(state) is not RuntimeState:
        raise IllegalStep(f"{call} needs a RuntimeState, got {type(state).__name__}")


def _refusal(edge: Edge, state: AnyState) -> str:
    joint = joint_of(state)
    wrong = [i for i, axis in enumerate(joint) if axis not in edge.before[i]]
    lines = [f"{edge.name}(state): the state is {describe(state)}", f"  it needs {needs(edge)}"]
    lines += [f"  {AXES[i][0]} is {joint[i].__name__}, and must be {names(edge.before[i])}" for i in wrong]
    if edge.apply(joint) == joint and all(edge.after[i] is joint[i] for i in wrong):
        lines.append(f"  leave it out: {edge.name} gives {' and '.join(joint[i].__name__ for i in wrong)}, and that is so already; or")
    way = route(joint, edge, without=state.devices.cannot)
    if way is not None:
        lines += ["  write instead:", *(f"    {written(step)}" for step in [*way, edge])]
    return "\n".join([*lines, _legal_now(state)])


def _legal_now(state: AnyState) -> str:
    return f"  legal now: {', '.join(legal(state)) or 'nothing'}"

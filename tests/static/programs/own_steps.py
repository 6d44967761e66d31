"""Never executed: a user's own steps are held to their annotations as the library's are."""

from rft import Asleep, Awake, E, Fresh, NoOld, O, OldLogProbs, OnDevice, RuntimeState, Stale, W, observation, then, transition


@transition
def rest(state: RuntimeState[E, W, OnDevice, NoOld], hours: float, /) -> RuntimeState[E, W, OnDevice, NoOld]:
    """A transition of one's own."""
    print(f"resting for {hours} hours")
    return then(state, state.engine, state.weights, state.actor, state.old)


@observation
def mood(state: RuntimeState[Awake, Fresh, OnDevice, NoOld], /) -> str:
    """An observation of one's own."""
    return str(state.version)


@transition
def forgets(state: RuntimeState[E, W, OnDevice, O], /) -> RuntimeState[E, Fresh, OnDevice, O]:
    """Promises fresh weights, and hands on those it was given."""
    return then(state, state.engine, state.weights, state.actor, state.old)  # expect: reportReturnType


def wrong_axis(state: RuntimeState[Awake, Fresh, OnDevice, OldLogProbs]) -> None:
    _rested = rest(state, 1.0)  # expect: reportArgumentType


def wrong_argument(state: RuntimeState[Awake, Fresh, OnDevice, NoOld]) -> None:
    _rested = rest(state, "1.0")  # expect: reportArgumentType


def missing_argument(state: RuntimeState[Awake, Fresh, OnDevice, NoOld]) -> None:
    _rested = rest(state)  # expect: reportCallIssue


def dropped(state: RuntimeState[Awake, Fresh, OnDevice, NoOld]) -> None:
    rest(state, 1.0)  # expect: reportUnusedCallResult


def kept_axis(state: RuntimeState[Asleep, Stale, OnDevice, NoOld]) -> str:
    return mood(rest(state, 1.0))  # expect: reportArgumentType

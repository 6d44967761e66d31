"""Every error of the library, under one base class.

An error says what was called, in which state, what it needs, and what to write instead. Catch `RftError` to catch them all.
`assert` is kept for mistakes of our own.
"""


class RftError(Exception):
    """Base of every error that `rft` raises on purpose."""


# ---- legality: the call is refused, and nothing has changed ----


class IllegalStep(RftError):
    """The state's axes do not allow this step."""


class ConsumedState(RftError):
    """This object is not the living state: an older one, a copy, a mapped or pickled one, or one built by hand."""


class BrokenInvariant(RftError):
    """A state was built by hand whose fields contradict each other; only `launch` and the transitions make states."""


class RoleError(RftError):
    """The role is no `Role`, is not there, or is not where the step needs it."""


class DoesNotFit(RftError):
    """What would lie on the device is more than is free there, on this rank or on another."""


class WrongBatch(RftError):
    """The experience belongs to another batch than the stored old log-probs, or they may not be used again."""


class TooStale(RftError):
    """The rollouts were sampled from weights older than `max_lag` allows."""


class ShapeError(RftError):
    """A record's field has another shape or dtype than it is declared with; the message names the axis."""


class BadInput(RftError):
    """A value that cannot work: a missing model, an empty data set, a prompt that is too long, a count below one."""


class TooFewGroups(RftError):
    """Dynamic sampling has tried as many batches of prompts as it may, and too few groups teach anything; the state lives on."""


class MissingEngine(BadInput):
    """The rollout engine is not installed, or too old; the message has the line that installs it."""


class MissingBackend(BadInput):
    """The training backend is not installed, or cannot be imported; the message has the line that installs it."""


# ---- failures: something went wrong while it was being done ----


class EngineFailed(RftError):
    """An engine effect failed on some rank after its first write; `recover(state)` leads on."""


class EnginePoisoned(RftError):
    """The engine failed earlier and is not to be trusted; `recover(state)` leads on."""


class SyncFailed(EngineFailed):
    """A broadcast did not arrive whole: the manifest or a checksum differs."""


class NonFiniteGradient(RftError):
    """The gradient's global norm is infinite or NaN; the optimizer was not touched, and the gradients are cleared."""


class RuntimePoisoned(RftError):
    """A step failed half-way, so models and optimizer are in no known state; `restore` a checkpoint, or leave `launch` and start anew."""


class CheckpointFailed(RftError):
    """A checkpoint could not be written or read; those that were there before still are, and the state lives on."""


class RuntimeClosed(RftError):
    """`launch` was left: the devices behind this state have been given back."""


class RanksDiverged(RftError):
    """The ranks are not at the same step, or one did not arrive before the deadline; the message has a table of them."""


class PeerFailed(RftError):
    """Another rank failed in a step that all ranks take together."""

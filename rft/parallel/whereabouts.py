"""Where this rank is, in words for the others, and when it has been there for too long.

What is bounded is waiting for others. A rank that meets the others waits for them until the deadline, and so does each collective: the
process groups' own timeout is the deadline too, and raises. That leaves ranks that nothing raises on, and this rank ends itself,
with a table of all ranks, when it

- is in one and the same call for longer than the deadline, inside a step. NCCL waits so, and a lock does. It is looked at several
  times a second: to be at the same instruction in every frame, at every look, is to wait; and on a CPU also to compute next to nothing.
  A step that takes longer than the deadline and moves on inside is never ended, and those of `OWN_PACE`, which may wait for something
  else than a rank, are left alone between their beginning and their end, where they meet the others like all;
- failed in a step, and has for a deadline neither met the others again nor left `launch`: they may wait for it in that step;
- was told that a deadline has passed, or lost the others in a collective, and has not left `launch` `GRACE_S` later, such as a loop
  that catches every error and goes on;
- has lost its parent, torchrun, which would end it when another rank fails.

Between steps a rank may take as long as it likes: if others wait for it there, the deadline is theirs.
"""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from torch.distributed import DistError

from rft.errors import RftError, RuntimePoisoned

OWN_PACE = frozenset({"generate", "generate_stale", "rewards", "save", "restore", "export"})
"""Steps that may sit in one call for long and wait for no rank: an engine in a process of its own, a reward, a file system."""
GRACE_S = 2.0
"""How long a rank may take to leave `launch` once a deadline has passed."""
BUSY = 0.2
"""The share of a core above which a rank computes, rather than waits."""
OTHERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
"""Where code lies that is not the user's."""

Place = tuple[int, ...]
"""Of a thread: its frames and the instruction that each is at."""


class Whereabouts:
    """What the main thread of a rank is doing. That thread writes, others read."""

    def __init__(self, deadline_s: float, *, spins: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`spins`: a thread that waits for its device computes nothing and yet keeps its core busy, as CUDA's does."""
        self._deadline, self._spins, self._clock = deadline_s, spins, clock
        self._thread, self._parent = threading.get_ident(), os.getppid()
        self._ends: tuple[float, str] | None = None
        self._place, self._looked, self._used = Place(), clock(), 0.0
        self._now("launch", "in it", bounded=False)

    # ---- told by the rank itself ----

    def comes(self, step: str) -> None:
        """It is about to wait for the others at a step."""
        self._now(step, "waits there for the others", bounded=True)

    def enters(self) -> None:
        """All have come, and the step begins."""
        self._ends = None
        self._now(self.step, "in it", bounded=self.step.split()[0] not in OWN_PACE)

    def leaves(self) -> None:
        """The step is over."""
        self._now(self.step, "after it", bounded=False)

    def fails(self, error: BaseException) -> None:
        """The step ended in an error."""
        self._now(self.step, f"failed in it ({_line(error)})", bounded=False)
        if may_be_alone(error):
            self._end_in(self._deadline, f"it failed in {self.step}, and has neither met the others nor left `launch` since")

    def closes(self, error: BaseException | None) -> None:
        """`launch` is being left."""
        self._now(self.step, "leaving `launch`" + (f" ({_line(error)})" if error else ""), bounded=False)
        if error is not None:
            self._end_in(self._deadline, "it could not leave `launch`")

    def given_up(self, why: str) -> None:
        """The ranks have lost each other."""
        self._end_in(GRACE_S, f"it has not left `launch` since: {why}")

    def _end_in(self, seconds: float, why: str) -> None:
        end = self._clock() + seconds, why
        self._ends = end if self._ends is None else min(self._ends, end)

    def _now(self, step: str, what: str, *, bounded: bool) -> None:
        self._bounded = False  # until all of it is written
        self.step, self._what, self._since = step, what, self._clock()
        self._moved, self._bounded = self._since, bounded

    # ---- asked by other threads ----

    def doing(self) -> str:
        """`in it for 12 s, at gloo.py:37 in __call__, from job.py:88 in slow`."""
        where = "" if threading.get_ident() == self._thread else _at(_frame(self._thread))
        return f"{self._what} for {self._clock() - self._since:.0f} s{where}"

    def overdue(self) -> str | None:
        """Why this process must end now, if it must. To be asked several times a second, by one thread."""
        now = self._clock()
        self._look(now)
        if os.getppid() != self._parent:
            return "what started this rank, torchrun as a rule, has ended"
        if self._ends is not None and now > self._ends[0]:
            return self._ends[1]
        if self._bounded and now - self._moved > self._deadline + 1.0:  # errors, which say more, come first
            return f"it was in one call of {self.step} for longer than the deadline of {self._deadline:g} s"
        return None

    def _look(self, now: float) -> None:
        place, used = _place(_frame(self._thread)), _computed(self._thread)
        if place != self._place or (not self._spins and used - self._used > BUSY * (now - self._looked)):
            self._moved = now
        self._place, self._looked, self._used = place, now, used


def may_be_alone(error: BaseException) -> bool:
    """Whether a rank may fail so while the others are still inside the step: what is refused, all ranks refuse."""
    return isinstance(error, RuntimePoisoned) or not isinstance(error, RftError)


def lost_others(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, says that the ranks can reach each other no more.

    gloo has no error of its own: it raises a plain `RuntimeError` with its name in the text.
    """
    while error is not None:
        if isinstance(error, DistError) or (type(error) is RuntimeError and ("gloo" in str(error) or "pair closure" in str(error))):
            return True
        error = error.__cause__
    return False


def _frame(thread: int) -> FrameType | None:
    return sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage] (documented as public)


def _place(frame: FrameType | None) -> Place:
    places = list[int]()
    while frame is not None:
        places += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return tuple(places)


def _computed(thread: int) -> float:
    """Seconds for which a thread has computed; where a system cannot tell, all threads together."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _at(frame: FrameType | None) -> str:
    """Where a thread is: the innermost call, and the innermost line of the user's."""
    if frame is None:
        return ""
    users = frame
    while users.f_back is not None and users.f_code.co_filename.startswith(OTHERS):
        users = users.f_back
    return f", at {_named(frame)}" + (f", from {_named(users)}" if users is not frame else "")


def _named(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _line(error: BaseException) -> str:
    """The first line of the error that others came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".partition("\n")[0][:160]

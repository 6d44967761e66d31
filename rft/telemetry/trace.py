"""When each step began and ended on this rank, and how full its device was: what a report's timeline and table of memory are made from."""

import dataclasses as dc
import time
from collections import deque
from typing import Protocol

from rft.telemetry.memory import Peak, PeakMeter

KEPT = 10_000
"""So that a run that nobody looks at does not fill its memory."""


@dc.dataclass(frozen=True)
class Span:
    """One step, in seconds since the trace was opened; the peak of the device's memory where that was measured."""

    name: str
    start_s: float
    end_s: float
    peak: Peak | None = None


class Follower(Protocol):
    """Something that wants to know of every step while it is taken, such as a live view."""

    def begin(self, name: str) -> None:
        """A step begins now."""
        ...

    def end(self, name: str, peak: Peak | None) -> None:
        """The step that has begun last ends now."""
        ...


class Trace:
    """The last spans (`KEPT` of them), in the order in which they ended; `take` empties it."""

    def __init__(self) -> None:
        self._origin, self._begun, self._spans = time.perf_counter(), 0.0, deque[Span](maxlen=KEPT)
        self._meter = PeakMeter()
        self.followers: list[Follower] = []

    def begin(self, name: str) -> None:
        """The step `name` begins now."""
        self._meter.begin()
        self._begun = time.perf_counter()
        for follower in self.followers:
            follower.begin(name)

    def end(self, name: str) -> None:
        """The step that has begun last ends now."""
        now, peak = time.perf_counter(), self._meter.end()
        self._spans.append(Span(name, self._begun - self._origin, now - self._origin, peak))
        for follower in self.followers:
            follower.end(name, peak)

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken = list(self._spans)
        self._spans.clear()
        return taken

"""When each step began and ended on this rank: what the timeline of a report is made from."""

import dataclasses as dc
import time


@dc.dataclass(frozen=True)
class Span:
    """One step, in seconds since the trace was opened."""

    name: str
    start_s: float
    end_s: float


class Trace:
    """Spans in the order in which they ended; `take` empties it."""

    def __init__(self) -> None:
        self._origin, self._begun, self._spans = time.perf_counter(), 0.0, list[Span]()

    def begin(self) -> None:
        """A step begins now."""
        self._begun = time.perf_counter()

    def end(self, name: str) -> None:
        """The step that has begun last ends now."""
        self._spans.append(Span(name, self._begun - self._origin, time.perf_counter() - self._origin))

    def take(self) -> list[Span]:
        """All spans since the last call."""
        taken, self._spans = self._spans, []
        return taken

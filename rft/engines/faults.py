"""Failures on demand: every verb of a scripted backend passes a point where it can be made to fail."""

import dataclasses as dc
from typing import Literal

Owner = Literal["engine", "trainer"]


class InjectedFault(Exception):
    """The failure that was asked for; not an `RftError`, as a backend's own failures are none."""


@dc.dataclass(frozen=True)
class Hit:
    """One verb that was reached: whose it is, and whether it writes (an engine that generates writes its cache)."""

    owner: Owner
    verb: str
    writes: bool


class Faults:
    """Counts the verbs that one step reaches, and fails at the one that was armed."""

    def __init__(self) -> None:
        self.hits = list[Hit]()
        self._armed: int | str | None = None
        self._fired = False

    def arm(self, point: int | str | None) -> None:
        """The `point`-th verb reached from now on will fail, or every one of that name; None: none will."""
        self.hits, self._armed, self._fired = [], point, False

    def fired(self) -> bool:
        """Whether an armed point was reached."""
        return self._fired

    def pass_by(self, owner: Owner, verb: str, *, writes: bool) -> None:
        """Called by a verb at its beginning, and once more in the middle of what it writes."""
        self.hits.append(Hit(owner, verb, writes))
        if self._armed in (len(self.hits) - 1, verb):
            self._fired = True
            raise InjectedFault(f"{owner}.{verb} was made to fail")

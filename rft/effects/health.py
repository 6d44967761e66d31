"""What the runtime has seen of itself; reading it changes nothing, and needs no living state."""

import dataclasses as dc
from typing import Any

from rft.effects.budget import on_device
from rft.effects.runtime import runtime_of
from rft.effects.watch import Gap
from rft.state import RuntimeState
from rft.telemetry.trace import Span


@dc.dataclass(frozen=True, kw_only=True)
class Health:
    """The probe's gaps since launch, the spans of the steps since the last look, and the bytes on this rank's device."""

    gaps: tuple[Gap, ...]
    spans: tuple[Span, ...]
    bytes: dict[str, int]


def health(state: RuntimeState[Any, Any, Any, Any]) -> Health:
    """Gaps, spans and bytes of the runtime behind a state."""
    runtime = runtime_of(state)
    return Health(gaps=tuple(runtime.watch.gaps), spans=tuple(runtime.trace.take()), bytes=on_device(state))


__all__ = ["Gap", "Health", "health"]

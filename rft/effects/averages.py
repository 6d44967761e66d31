"""Means over all ranks, for metrics."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rft.effects.runtime import runtime_of
from rft.state import RuntimeState


def average(state: RuntimeState[Any, Any, Any, Any], values: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Mean of each column over the entries of all ranks; NaN for a column that is empty everywhere."""
    own = {name: (math.fsum(column), len(column)) for name, column in ((name, list(map(float, v))) for name, v in values.items())}
    everywhere = runtime_of(state).lockstep.gather(own)
    sums = {name: (sum(part[name][0] for part in everywhere), sum(part[name][1] for part in everywhere)) for name in own}
    return {name: total / count if count else math.nan for name, (total, count) in sums.items()}

"""Plans the micro-batches of all ranks at once: as many passes on every rank, of like work, and none that waits alone.

Rows stay on their own rank. What a pass may hold is counted in tokens; how long it takes, in work, which grows faster than a row's
length. The denominators of the global batch are counted here too, from the same numbers.
"""

import bisect
import dataclasses as dc
import functools
from collections.abc import Callable, Sequence
from typing import Literal

from rft.errors import BadInput
from rft.ops.aggregation import Totals

Layout = Literal["packed", "padded"]
"""How the rows of a pass lie in memory: one behind the other, or each as wide as the longest."""

Batches = tuple[tuple[int, ...], ...]
"""batches[k]: the rows, of one rank's own, that its k-th pass takes; none where it only keeps the other ranks company."""


@dc.dataclass(frozen=True, kw_only=True)
class Rows:
    """What a rank tells the others of its rows: an entry for each."""

    lengths: tuple[int, ...]
    """In tokens, at least 1."""
    sampled: tuple[int, ...]
    """How many of them train."""
    demonstrated: tuple[bool, ...]
    """Whether the row is to be imitated, and was not sampled."""


@dc.dataclass(frozen=True, kw_only=True)
class Plan:
    """The passes of every rank, equally many, and what the global batch amounts to."""

    ranks: tuple[Batches, ...]
    totals: Totals


def plan(ranks: Sequence[Rows], budget: int, *, width: int, layout: Layout = "packed") -> Plan:
    """The micro-batches of every rank, from all ranks' rows and a budget of tokens for one pass.

        packed:  Σ lengths ≤ budget                    work(row) = length (12 width + length)
        padded:  rows × longest ≤ budget               work of a pass = rows × work(longest)

    Each row stands in exactly one micro-batch of its rank; one that is longer than the budget has it to itself. Every rank has as
    many micro-batches as the rank that needs most: packed, by first fit, longest first (at most 11/9 of the fewest possible, and one);
    padded, the fewest. Over these a rank spreads its rows so that the passes are of like work: packed, until no row can go to another
    pass that has room and leave the heavier of the two lighter; padded, in order of length, with the heaviest as light as can be.
    The heaviest comes first, since in the k-th pass the ranks wait for each other. Where a rank has fewer rows than passes, the last
    ones are empty: run a filler there that contributes nothing.

    `width` is that of the hidden states: for a row a transformer's linear layers take about 24 width² length operations per layer, and
    causal attention 2 width length². Pure and exact: the same input gives the same plan on every rank, and the order of the
    rows changes nothing but which of several rows of one length goes where. Raises `BadInput` for a budget or a length below 1.
    """
    if budget < 1 or any(length < 1 for rows in ranks for length in rows.lengths):
        raise BadInput(f"budget and lengths must be at least 1, got {budget} and {[rows.lengths for rows in ranks]}")
    orders = [sorted(range(len(rows.lengths)), key=rows.lengths.__getitem__, reverse=True) for rows in ranks]
    sorted_lengths = [[rows.lengths[row] for row in order] for rows, order in zip(ranks, orders, strict=True)]
    fewest, spread = (_first_fit, _evened) if layout == "packed" else (_neighbours, _levelled)
    count = max((_count(fewest(lengths, budget)) for lengths in sorted_lengths), default=0)
    passes = [spread(lengths, budget, count, width) for lengths in sorted_lengths]
    weigh = functools.partial(_weight, width=width, layout=layout)
    batches = [_named(own, order, lengths, count, weigh) for own, order, lengths in zip(passes, orders, sorted_lengths, strict=True)]
    return Plan(ranks=tuple(batches), totals=totals(ranks))


def totals(ranks: Sequence[Rows]) -> Totals:
    """What the rows of all ranks amount to: the denominators of the global batch."""
    every = [pair for rows in ranks for pair in zip(rows.sampled, rows.demonstrated, strict=True)]
    return Totals(
        tokens=sum(tokens for tokens, demonstrated in every if not demonstrated),
        sequences=sum(tokens > 0 for tokens, demonstrated in every if not demonstrated),
        demonstrated=sum(tokens for tokens, demonstrated in every if demonstrated),
    )


def work(length: int, width: int) -> int:
    """What a forward and backward pass over one row costs, in units of its own."""
    return length * (12 * width + length)


# Below, `lengths` are one rank's in falling order, and a list of passes says for each of them the number of the pass that it goes to.


def _first_fit(lengths: Sequence[int], budget: int) -> list[int]:
    """Each row goes to the first pass that has room for it, in tokens."""
    used: list[int] = []
    passes: list[int] = []
    for length in lengths:
        chosen = next((k for k, tokens in enumerate(used) if tokens + length <= budget), len(used))
        used[chosen:] = [length] if chosen == len(used) else [used[chosen] + length, *used[chosen + 1 :]]
        passes.append(chosen)
    return passes


def _evened(lengths: Sequence[int], budget: int, count: int, width: int) -> list[int]:
    """First fit, then rows move to the lightest of `count` passes that has room, as long as that evens out the two."""
    passes, used, load = _first_fit(lengths, budget), [0] * count, [0] * count
    for length, k in zip(lengths, passes, strict=True):
        used[k], load[k] = used[k] + length, load[k] + work(length, width)
    moved = True
    while moved:
        moved = False
        for row, length in enumerate(lengths):
            own, weight = passes[row], work(length, width)
            chosen = min((k for k in range(count) if used[k] + length <= budget), key=load.__getitem__, default=own)
            if load[chosen] + weight < load[own]:  # so that Σ load² falls, and this ends
                for k, sign in ((own, -1), (chosen, 1)):
                    used[k], load[k] = used[k] + sign * length, load[k] + sign * weight
                passes[row], moved = chosen, True
    return passes


def _neighbours(lengths: Sequence[int], budget: int, heaviest: int | None = None, width: int = 1) -> list[int]:
    """Each pass takes the next rows as long as their number times the first one's tokens and work allow: the fewest passes."""
    passes: list[int] = []
    first = 0
    for row in range(len(lengths)):
        rows, longest = row + 1 - first, lengths[first]
        if rows > 1 and (rows * longest > budget or (heaviest is not None and rows * work(longest, width) > heaviest)):
            first = row
        passes.append(passes[-1] + (first == row) if passes else 0)
    return passes


def _levelled(lengths: Sequence[int], budget: int, count: int, width: int) -> list[int]:
    """Neighbours in at most `count` passes, the heaviest of them as light as can be."""
    if not lengths:
        return []
    least = work(lengths[0], width)
    limits = range(least, len(lengths) * least)
    enough = bisect.bisect_left(limits, True, key=lambda limit: _count(_neighbours(lengths, budget, limit, width)) <= count)
    return _neighbours(lengths, budget, least + enough, width)


def _count(passes: Sequence[int]) -> int:
    return max(passes, default=-1) + 1


def _weight(lengths: Sequence[int], width: int, layout: Layout) -> int:
    """The work of a pass over rows of these lengths."""
    if layout == "packed":
        return sum(work(length, width) for length in lengths)
    return len(lengths) * work(max(lengths, default=0), width)


def _named(
    passes: Sequence[int], order: Sequence[int], lengths: Sequence[int], count: int, weigh: Callable[[Sequence[int]], int]
) -> Batches:
    """The rows of each pass by their own numbers, the heaviest pass first."""
    places = [[place for place, chosen in enumerate(passes) if chosen == k] for k in range(count)]
    places.sort(key=lambda batch: weigh([lengths[place] for place in batch]), reverse=True)
    return tuple(tuple(order[place] for place in batch) for batch in places)

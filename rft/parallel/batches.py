"""Plans the micro-batches of all ranks at once, so that every rank runs the same number of forward passes and none waits alone."""

from collections.abc import Sequence

from rft.errors import BadInput

Plan = tuple[tuple[tuple[int, ...], ...], ...]
"""plan[rank][k]: the rows, of that rank's own, that its k-th micro-batch takes; none where it only keeps the others company."""


def plan(lengths: Sequence[Sequence[int]], budget: int) -> Plan:
    """The micro-batches of every rank, from every rank's sequence lengths (in tokens) and a budget of padded tokens.

    Each row stands in exactly one micro-batch of its rank. A micro-batch costs rows × longest, at most `budget`; a longer row has
    one to itself. Rows go longest first (ties in their order), so that the ranks' k-th passes are of a size. All ranks have as many
    micro-batches as the one that needs the most, the others' last ones being empty: run a filler row there. Pure: the same input
    gives the same plan on every rank. Raises `BadInput` for a budget or a length below 1.
    """
    if budget < 1 or any(length < 1 for own in lengths for length in own):
        raise BadInput(f"budget and lengths must be at least 1, got {budget} and {lengths}")
    packed = [_pack(own, budget) for own in lengths]
    count = max((len(batches) for batches in packed), default=0)
    return tuple(tuple(batches) + ((),) * (count - len(batches)) for batches in packed)


def _pack(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """The fewest micro-batches of neighbours in order of length: greedy, for the longest row comes first and sets the cost."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [tuple(batch) for batch in batches]

"""Which engine generates what: prompts go to the DP groups by the tokens that they may take, the longest first."""

from collections.abc import Sequence

SLACK = 1.05
"""A group may have so much more than its equal share before a prompt is sent elsewhere: moving one takes time, too."""


def balanced(tokens: Sequence[Sequence[int]], groups: Sequence[int]) -> list[list[int]]:
    """The group that generates each prompt: `result[rank][prompt]`, from the tokens of every rank's prompts, all samples included.

        budget = max(SLACK · Σ tokens / groups, largest prompt)

    `groups[rank]` is the rank's own group, numbered from 0. Longest first, a prompt stays with its own group while that is within the
    budget, and goes to the emptiest one otherwise: no group has more than the budget, or than an equal share and one prompt. Samples of
    one prompt stay together, since they share its prefix. Pure: the same on every rank.

    Source: Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17, 1969
    """
    count = max(groups) + 1
    each = [(size, rank, prompt) for rank, sizes in enumerate(tokens) for prompt, size in enumerate(sizes)]
    units = sorted(each, key=lambda unit: (-unit[0], *unit[1:]))
    total = sum(size for size, _, _ in units)
    budget = max(SLACK * total / count, units[0][0] if units else 0)
    load, chosen = [0] * count, [[0] * len(sizes) for sizes in tokens]
    for size, rank, prompt in units:
        home = groups[rank]
        group = home if load[home] + size <= budget else min(range(count), key=load.__getitem__)
        load[group] += size
        chosen[rank][prompt] = group
    return chosen

"""Requests of all ranks over all engines, and completions back to whom they are of.

The ranks of a TP group feed one engine together. Between the engines of several DP groups prompts are balanced by `parallel.balance`:
most stay where they are, and those that do not travel over the host, with all of their samples.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rft.engines.protocol import Completion, Request
from rft.parallel.balance import balanced
from rft.parallel.messages import gathered
from rft.parallel.world import World

Prompt = Sequence[Request]
"""All requests of one prompt."""
Place = tuple[int, int]
"""A rank, and the number of a prompt among its own."""


class Shared:
    """The prompts that this rank's engine is to generate for; `requests` has them all, the same on every rank of the TP group."""

    def __init__(self, world: World, own: Sequence[Prompt], new_tokens: int) -> None:
        """Collective over the whole world. `new_tokens` may come at most to each request."""
        self._world, self._count = world, len(own)
        self._engines = [rank // world.tp_size for rank in range(world.size)]
        chosen = self._chosen([len(prompt[0].tokens) + len(prompt) * new_tokens for prompt in own])
        here = {place for place, engine in chosen.items() if engine == world.dp_rank}
        self._moved = {place for place, engine in chosen.items() if engine != self._engines[place[0]]}
        known = {(world.rank, number): prompt for number, prompt in enumerate(own)}
        leaving = {place: prompt for place, prompt in known.items() if place in self._moved}
        for found in (*(_all(known, world.tp, world.tp_size)), *(_all(leaving, world.host, world.size) if self._moved else ())):
            known |= found
        self._prompts = {place: known[place] for place in sorted(here)}

    @property
    def requests(self) -> list[Request]:
        """In the order of ranks and prompts."""
        return [request for prompt in self._prompts.values() for request in prompt]

    def own(self, completions: Sequence[Completion]) -> list[Completion]:
        """Of those for `requests`, and of what other engines made, the ones of this rank's prompts. Collective over the whole world."""
        world, left, found = self._world, iter(completions), dict[Place, list[Completion]]()
        for place, prompt in self._prompts.items():
            found[place] = [next(left) for _ in prompt]
        if self._moved:
            returning = {place: made for place, made in found.items() if place in self._moved and world.tp_rank == 0}
            for made in _all(returning, world.host, world.size):
                found |= made
        return [completion for number in range(self._count) for completion in found[world.rank, number]]

    def _chosen(self, tokens: list[int]) -> dict[Place, int]:
        """The engine of each prompt in the world."""
        world = self._world
        if world.dp_size == 1:
            everybody = _all(list(range(len(tokens))), world.tp, world.tp_size)
            return {(rank, number): 0 for rank, numbers in enumerate(everybody) for number in numbers}
        engines = balanced(_all(tokens, world.host, world.size), self._engines)
        return {(rank, number): engine for rank, row in enumerate(engines) for number, engine in enumerate(row)}


def _all(mine: Any, group: dist.ProcessGroup | None, size: int) -> list[Any]:
    """What each rank of a group has."""
    return gathered(mine, group, size)

"""The contract on several ranks: a script under torchrun builds the engine, and calls `check_ranks` on each of them."""

import contextlib
import dataclasses as dc
from collections.abc import Callable
from typing import Any

from rft.engines.protocol import Engine
from rft.errors import EngineFailed, EnginePoisoned, RftError
from rft.loops import refresh
from rft.parallel.world import World
from rft.steps import broadcast, generate, recover
from rft.testing.engines.broadcasts import BREACHES, GREEDILY, SAMPLED, Sender, breached, engine_launch, prompts_of, responses
from rft.testing.engines.oracle import PROMPTS

Told = dict[str, list[int]]
"""The tokens of each response, by `"<prompt>, <sample>"`."""


def check_ranks(engine: Engine, module: Any, tokenizer: Any, world: World, prompts: tuple[tuple[int, ...], ...] = PROMPTS) -> Told:
    """Holds on every rank of `world`, or raises AssertionError there. The ranks share the prompts; gives what this one's were answered.

    - A broadcast that fails on the last rank, in any way, has failed on all of them, and poisons the engine on all of them; a full one
      heals it, and then it says what it said before.
    - A rank without prompts takes part in what the others generate.
    - What all ranks together are told is a matter of the prompts: compare it with another number of ranks.
    """
    sender, own = Sender(module), prompts_of(prompts[world.rank :: world.size], step=world.size, first=world.rank)
    with engine_launch(engine, sender, tokenizer, world=world) as begun:
        state: Any = refresh(begun)
        told = responses(generate(state, own, SAMPLED))
        first = responses(generate(state, own, GREEDILY))
        for breach in BREACHES:
            with breached(engine, sender, breach) if world.rank == world.size - 1 else contextlib.nullcontext():
                _refused(EngineFailed, breach, broadcast, state)
            _refused(EnginePoisoned, breach, generate, state, own, GREEDILY)
            state = refresh(recover(state))
            assert responses(generate(state, own, GREEDILY)) == first, f"after this broadcast: {breach}"
        lonely = generate(state, own if world.rank == 0 else prompts_of(()), dc.replace(SAMPLED, samples=1))
        assert responses(lonely) == ({(prompt, 0): told[prompt, 0] for prompt, sample in told if not sample} if world.rank == 0 else {})
    return {f"{prompt}, {sample}": list(tokens) for (prompt, sample), tokens in told.items()}


def _refused(kind: type[RftError], breach: str, step: Callable[..., Any], *arguments: Any) -> None:
    try:
        _ = step(*arguments)
    except kind:
        return
    raise AssertionError(f"{step.__name__} went well on this rank, after this broadcast: {breach}")

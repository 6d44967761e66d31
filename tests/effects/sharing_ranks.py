"""Four ranks, two TP groups, and an engine that answers with the request's own numbers: sharing_ranks.py OUT."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from rft.effects.sharing import Shared
from rft.engines.protocol import Completion, Request
from rft.parallel.world import open_world

CASES = {
    "even": [2, 2, 2, 2],
    "all on one rank": [8, 0, 0, 0],
    "none at all": [0, 0, 0, 0],
    "uneven": [5, 1, 0, 2],
}
"""Prompts of each rank."""
SAMPLES, NEW_TOKENS = 3, 10


def prompt(rank: int, number: int) -> list[Request]:
    """Its samples; prompts are of different lengths."""
    return [Request(tokens=(rank,) * (1 + number), seed=1000 * rank + 10 * number + sample) for sample in range(SAMPLES)]


def answer(request: Request) -> Completion:
    return Completion(tokens=(request.seed,), logprobs=(0.0,), finish="stop")


def main(out: Path) -> None:
    world = open_world(2, timeout_s=60)
    told = {}
    for name, counts in CASES.items():
        shared = Shared(world, [prompt(world.rank, number) for number in range(counts[world.rank])], NEW_TOKENS)
        asked = [request.seed for request in shared.requests]
        told[name] = {"asked": asked, "got": [c.tokens[0] for c in shared.own([answer(r) for r in shared.requests])]}
    _ = (out / f"{world.rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Every function of whole batches, over the rows of all ranks: together_ranks.py RESULTS. Rank r leaves its rows in RESULTS/r.pt."""

import sys
from pathlib import Path
from typing import Any

import torch

import rft
from rft.parallel.world import open_world
from rft.testing import SAMPLING, scripted_launch, scripted_prompts
from tests.effects.batches import FUNCTIONS, SHARES, columns_of


def refused(state: Any, rows: Any) -> str:
    try:
        rft.over_ranks(state, torch.neg, *rows)
    except rft.RftError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def ended(state: Any, rank: int) -> tuple[str, bool]:
    """Rank 1 has one batch of prompts, and both would need more; whether they go on together then."""
    prompts = [scripted_prompts(1, epoch=10 * batch + rank) for batch in range(5)]
    return collected(state, rank, prompts[:1] if rank else prompts, rft.Wanted(groups=1, bound=4))


def kept_by_nobody(state: Any, rank: int) -> tuple[str, bool]:
    """What is to say which rows are kept fails on rank 1."""

    def keep(found: rft.Collected) -> torch.Tensor:
        return torch.ones(len(found.rollouts) + rank, dtype=torch.bool)

    prompts = [scripted_prompts(1, epoch=100 + rank)]
    return collected(state, rank, prompts, rft.Wanted(groups=1, bound=1, keep=keep))


def collected(state: Any, rank: int, prompts: list[rft.Prompts], wanted: rft.Wanted) -> tuple[str, bool]:
    """The error, and whether the ranks go on together after it."""
    try:
        _ = rft.collect_groups(state, iter(prompts), SAMPLING, lambda _: 1.0, wanted)
    except rft.RftError as error:
        return f"{type(error).__name__}: {error}", rft.average(state, {"rank": [rank]})["rank"] == 0.5
    return "nothing was raised", False


def main() -> None:
    world = open_world(1, timeout_s=60)
    own = columns_of(SHARES[world.rank])
    with scripted_launch(world=world) as state:
        seen: dict[str, Any] = {
            name: rft.over_ranks(state, function, *(own[column] for column in names)) for name, (function, names) in FUNCTIONS.items()
        }
        seen["all rows"] = rft.all_rows(state, own["rewards"], own["logprobs"])
        seen["refused"] = refused(state, (own["rewards"][: 1 + world.rank], own["groups"][:1]))
        whole = 2**24 + 1 + torch.arange(2)  # what float32 would round
        seen["of two dtypes"] = refused(state, (whole if world.rank else whole.float(),))
        state = rft.refresh(state)
        seen["ended"], seen["kept by nobody"] = ended(state, world.rank), kept_by_nobody(state, world.rank)
    torch.save(seen, Path(sys.argv[1]) / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

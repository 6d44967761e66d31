"""Every function of whole batches, over the rows of all ranks: together_ranks.py RESULTS. Rank r leaves its rows in RESULTS/r.pt."""

import sys
from pathlib import Path
from typing import Any

import torch

import rft
from rft.parallel.world import open_world
from rft.testing import scripted_launch
from tests.effects.batches import FUNCTIONS, SHARES, columns_of


def refused(state: Any, rows: Any) -> str:
    try:
        rft.over_ranks(state, torch.neg, *rows)
    except rft.RftError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main() -> None:
    world = open_world(1, timeout_s=60)
    own = columns_of(SHARES[world.rank])
    with scripted_launch(world=world) as state:
        seen: dict[str, Any] = {
            name: rft.over_ranks(state, function, *(own[column] for column in names)) for name, (function, names) in FUNCTIONS.items()
        }
        seen["all rows"] = rft.all_rows(state, own["rewards"], own["logprobs"])
        seen["refused"] = refused(state, (own["rewards"][: 1 + world.rank], own["groups"][:1]))
    torch.save(seen, Path(sys.argv[1]) / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

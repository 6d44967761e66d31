"""What loading a model costs each rank in host memory: memory_ranks.py MODEL RESULTS SMALL. Rank r leaves it in RESULTS/r.pt."""

import sys
from pathlib import Path

import torch

from rft.models import ModelFolder, find_model
from rft.parallel.world import World, open_world
from rft.trainers import hugging_face
from rft.trainers.loading import on_rank_0
from rft.trainers.scorer import bare_scorer, scorer
from rft.trainers.sharded import Sharded

MODEL, RESULTS, SMALL = map(Path, sys.argv[1:])


def peak() -> int:
    """The most bytes that were resident at a time, since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def load(folder: ModelFolder, world: World) -> Sharded:
    """The weights alone, in shards: moments come later, when what was read is let go of."""
    root = on_rank_0(
        world,
        lambda: scorer(hugging_face.load(folder, checkpointing=True)),
        lambda layout: bare_scorer(hugging_face.empty(folder, checkpointing=True), layout),
    )
    return Sharded(root, world, dtype="float32", keep_gathered=True)


def main() -> None:
    torch.set_num_threads(1)
    world = open_world(1, timeout_s=120)
    load(find_model(str(SMALL)), world).close()  # what is imported and set up only once
    folder = find_model(str(MODEL))
    torch.distributed.barrier()
    forget_peak()
    before = peak()
    held = load(folder, world)
    torch.save({"grown": peak() - before, "held": held.weights.bytes}, RESULTS / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

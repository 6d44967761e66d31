"""What several ranks do for `test_ranks.py`: ranks.py SCENE FOLDER. The runtime is scripted; what it saves are real shards.

Each rank leaves what it saw in FOLDER/<scene>-<ranks>-<rank>.json.
"""

import json
import logging
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import rft
from rft.checkpoint import manifest, randomness
from rft.errors import RftError
from rft.parallel.world import open_world
from rft.steps import restore, save
from rft.testing import scripted_devices, scripted_launch

SHAPES = {"wide": (7, 3), "short": (1,), "half": (4, 2), "long": (129,)}
"""Not all divide by the ranks, and some ranks get nothing of some."""


class Shards:
    """What a sharded trainer saves: tensors cut over groups of ranks, and a plain one that all hold alike."""

    def __init__(self, ranks: int, groups: int, value: int) -> None:
        self.mesh = init_device_mesh("cpu", (groups, ranks // groups), mesh_dim_names=("replicate", "shard"))
        self.tensors = {f"model.{name}": self.cut(whole(name, value)) for name in SHAPES} | {"optimizer.steps": torch.tensor(value)}

    def cut(self, tensor: Tensor) -> DTensor:
        parts, place = tensor.chunk(self.mesh["shard"].size()), self.mesh["shard"].get_local_rank()
        own = parts[place].clone() if place < len(parts) else tensor[:0].clone()
        return DTensor.from_local(own, self.mesh, [Replicate(), Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())

    def saved(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def values(self) -> dict[str, Any]:
        return {name: (t.full_tensor() if isinstance(t, DTensor) else t).double().tolist() for name, t in self.tensors.items()}


def whole(name: str, value: int) -> Tensor:
    """A tensor of `SHAPES`, another one for every value."""
    numbers = torch.arange(float(torch.Size(SHAPES[name]).numel())) + value
    return (numbers.bfloat16() if name == "half" else numbers).reshape(SHAPES[name])


def shards(state: Any, value: int, groups: int = 1) -> Shards:
    """Gives the scripted trainer's state real shards of a value."""
    made, trainer = Shards(dist.get_world_size(), groups, value), state.devices.trainer
    trainer.saved, trainer.install = made.saved, made.install
    return made


def message(act: Any) -> str:
    """The error that is raised; everybody goes on living."""
    try:
        act()
    except RftError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def write(state: Any, folder: Path) -> dict[str, Any]:
    """Saves value 5 with this rank's own random state."""
    _ = shards(state, 5, groups=2 if dist.get_world_size() % 2 == 0 else 1)
    random.seed(dist.get_rank())
    path = save(state, folder / "kept", {"step": 1})
    return {"path": str(path), "random": random.random(), "files": sorted(manifest.files_below(path))}


def read(state: Any, folder: Path) -> dict[str, Any]:
    """Takes it back into shards of value 0."""
    made = shards(state, 0)
    random.seed(1000)
    state, run = restore(state, folder / "kept", {"step": 0})
    return {"values": made.values(), "run": run, "random": random.random()}


def differ(state: Any, folder: Path) -> dict[str, Any]:
    """Things that one rank alone does, or meets: all must refuse, and go on together."""
    made, rank, seen = shards(state, 5), dist.get_rank(), dict[str, Any]()
    seen["other values"] = message(lambda: save(state, folder / "a", {"step": 1, "mine": rank}))
    seen["other arguments"] = [
        message(lambda: save(state, folder / f"own{rank}", {"step": 1})),
        message(lambda: save(state, folder / "a", {"step": 1}, keep=2 + rank)),
        message(lambda: restore(state, folder / f"own{rank}", {"step": 0})),
        message(lambda: rft.export(state, folder / f"own{rank}")),
    ]
    (folder / "file-of-1").touch()
    seen["file"] = message(lambda: rft.export(state, folder / ("file-of-1" if rank else "a")))
    seen["own folders"] = sorted(path.name for path in folder.glob("own*"))
    seen["not savable"] = message(lambda: save(state, folder / "a", {"x": object() if rank else 1}))
    seen["no folder yet"] = (folder / "a").exists()
    seen["other file"] = message(lambda: in_the_way(state, folder / "b", rank))
    seen["no random states"] = message(lambda: no_random_states(state, folder / "b", rank))
    _ = save(state, folder / "b", {"step": 1})
    seen["left"] = sorted(path.name for path in (folder / "b").iterdir())
    made.tensors = {f"x.{name}": tensor for name, tensor in made.tensors.items()}
    seen["other names"] = message(lambda: restore(state, folder / "b", {"step": 0}))
    seen["other structure"] = message(lambda: restore(state, folder / "b", {"step": 0} if rank else [0]))
    seen["legal"] = "save" in rft.legal(state)
    return seen


def in_the_way(state: Any, folder: Path, rank: int) -> None:
    """On one rank the disk is full."""
    if rank == 1:
        fsync, os.fsync = os.fsync, full
    try:
        _ = save(state, folder, {"step": 1})
    finally:
        if rank == 1:
            os.fsync = fsync


def no_random_states(state: Any, folder: Path, rank: int) -> None:
    """On one rank alone the random states cannot be written."""
    writes = randomness.write
    if rank == 1:
        randomness.write = full
    try:
        _ = save(state, folder, {"step": 1})
    finally:
        randomness.write = writes


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def main(scenes: str, folder: Path) -> None:
    for scene in scenes.split(","):
        world = open_world(1, timeout_s=60)
        with scripted_launch(world=world) as state:
            seen = {"write": write, "read": read, "differ": differ}[scene](state, folder)
            assert scripted_devices(state).engine is not None
        _ = (folder / f"{scene}-{world.size}-{world.rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main(sys.argv[1], Path(sys.argv[2]))

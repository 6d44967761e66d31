"""How checkpoints cut a tensor, whatever the backend: along dimension 0, as `torch.chunk` does, a slice for each rank of a group."""

import functools

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rft.errors import BadInput
from rft.parallel.world import World


class Slices:
    """Slices over groups of `count` neighbouring ranks, each of which has all of them between its ranks."""

    def __init__(self, world: World, count: int) -> None:
        self.count, self._world = count, world

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks with their host memory. The first use is collective."""
        return mesh("cpu", self._world, self.count)

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's slice of a whole tensor."""
        parts = whole.chunk(self.count, dim=0)
        rank = self._world.rank % self.count
        return parts[rank] if rank < len(parts) else whole[:0]

    def on_host(self, part: Tensor, shape: torch.Size) -> DTensor:
        """A copy on the host of this rank's slice of a tensor of `shape`, marked as that. Collective."""
        copy, stride = part.detach().to("cpu", copy=True), torch.empty(shape, device="meta").stride()
        return DTensor.from_local(copy, self.mesh, [Replicate(), Shard(0)], run_check=False, shape=shape, stride=stride)


def mesh(kind: str, world: World, count: int) -> DeviceMesh:
    """`replicate` × `shard`. Raises `BadInput` as `require_divisor` does."""
    require_divisor(world, count)
    return init_device_mesh(kind, (world.size // count, count), mesh_dim_names=("replicate", "shard"))


def require_divisor(world: World, count: int) -> None:
    """Raises `BadInput` where `count` does not divide the number of ranks."""
    if count < 1 or world.size % count:
        raise BadInput(f"shards={count} does not divide the world size {world.size}; start torchrun with a multiple of {count} processes")

"""A model under PyTorch's `fully_shard`: every rank holds a slice of every parameter, and gathers what it computes with.

The whole of a model is read by rank 0 alone; the others begin with parameters without memory, and are sent their slices.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rft.narrow import UNCUT, Narrows, narrowed
from rft.parallel.world import World
from rft.trainers import hugging_face
from rft.trainers.backend import Root, Wanted, every
from rft.trainers.gathering import gathered
from rft.trainers.gloo import GlooReduceScatter
from rft.trainers.inputs import Inputs
from rft.trainers.loading import read, sent
from rft.trainers.pieces import Gathering
from rft.trainers.shelf import Shelf
from rft.trainers.slices import Slices, mesh


class Sharded:
    """A root, sharded over groups of `shards` neighbouring ranks (None: all ranks), each of which holds all of it."""

    def __init__(
        self, root: Root, world: World, *, dtype: str, shards: int | None = None, keep_gathered: bool, on_host: bool = False
    ) -> None:
        self.root: Any = root
        self._world, self._count, self._on_host = world, shards or world.size, on_host
        self._mesh, self.slices = mesh(world.device.type, world, self._count), Slices(world, self._count)
        whole = read(root, world) if world.size > 1 else {}
        self._shard(dtype, keep_gathered)
        self.modules = [module for module in self.root.modules() if isinstance(module, FSDPModule)]
        self.parameters: list[Any] = list(self.root.parameters())
        self._give_memory()
        self._hand_out(whole)
        self.weights = Shelf([] if on_host else local(self.parameters))
        self._named: dict[str, Tensor] = self.root.named()

    # ---- computing ----

    def forward(self, asked: Inputs) -> tuple[Tensor, ...]:
        """See `Asked`."""
        return self.root(asked)

    def training(self, mode: bool) -> None:
        """See `Asked`."""
        self.root.train(mode)

    def after_passes(self) -> None:
        """See `Asked`."""
        # What a forward without gradient gathered stays gathered, as does the root, until somebody says otherwise.
        for module in self.modules:
            module.reshard()

    # ---- weights ----

    def shape_of(self, tensor: Tensor) -> torch.Size:
        """See `Backend`."""
        return tensor.shape

    def comes_in(self, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
        """See `Backend`."""
        return self._among.dtype_of(tensor.dtype, dtype if isinstance(tensor, torch.nn.Parameter) else None)

    def whole(
        self, wanted: Wanted = every, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """See `Backend`."""
        ours = set(map(id, self.parameters))
        named = ((n, t) for n, t in self._named.items() if id(t) in ours and wanted(n))
        shards = ((n, tuple(t.shape), self._readable(t)) for n, t in named)
        yield from gathered(shards, self._among, dtype, narrows)
        yield from narrowed(self.buffers(wanted), narrows[self._world.rank] if narrows else UNCUT)

    def buffers(self, wanted: Wanted = every) -> Iterator[tuple[str, Tensor]]:
        """Every named tensor that is no parameter; each rank has all of it."""
        ours = set(map(id, self.parameters))
        yield from ((n, t) for n, t in self._named.items() if id(t) not in ours and wanted(n))

    def sliced(self) -> dict[str, tuple[Any, Tensor]]:
        """Every named parameter, and this rank's slice of it, from the host while it is away."""
        ours = set(map(id, self.parameters))
        return {n: (t, self._readable(t)) for n, t in self._named.items() if id(t) in ours}

    def close(self) -> None:
        """Gives everything back."""
        self.weights.close()
        self.root, self.modules, self.parameters, self._named = None, [], [], {}
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _readable(self, parameter: Any) -> Tensor:
        """This rank's slice of a parameter, wherever it lies."""
        return self.weights.here(*local([parameter]))

    @functools.cached_property
    def _among(self) -> Gathering:
        group: Any = self._mesh.get_group("shard") if self._count > 1 else None
        first = self._world.rank // self._count * self._count
        return Gathering(group=group, size=self._count, device=self._world.device, first=first)

    def _shard(self, dtype: str, keep_gathered: bool) -> None:
        offload = CPUOffloadPolicy(pin_memory=self._world.device.type == "cuda") if self._on_host else OffloadPolicy()
        mesh = self._mesh["shard"] if self._count == self._world.size else self._mesh
        exact = self.root.exact()
        for module in [*hugging_face.blocks(self.root.model), *exact, self.root]:
            # What the root itself is given is to keep its dtype: temperatures are fp32.
            computing = torch.float32 if module in exact else getattr(torch, dtype)
            dtypes: dict[str, Any] = {"param_dtype": computing, "reduce_dtype": torch.float32}
            policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=module is not self.root)
            options: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload, "reshard_after_forward": not keep_gathered}
            sharded: Any = fully_shard(module, mesh=mesh, **options)
            if self._world.device.type == "cpu" and self._count > 1:
                sharded.set_custom_reduce_scatter(GlooReduceScatter())

    def _give_memory(self) -> None:
        """To slices that have none yet; buffers have theirs."""
        buffers = [(m, n, b.to(self._world.device)) for m in self.root.modules() for n, b in m.named_buffers(recurse=False)]
        if any(p.is_meta for p in self.root.parameters()):
            self.root.to_empty(device="cpu" if self._on_host else self._world.device)
        for module, name, buffer in buffers:
            module.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)

    def _hand_out(self, whole: Mapping[str, Tensor]) -> None:
        """Each rank keeps its slice of what rank 0 has."""
        if self._world.size == 1:
            return
        ours = set(map(id, self.parameters))
        for _, tensor, full in sent(self.root, whole, self._world):
            here: Any = tensor.detach()
            if not whole:
                _ = here.to_local().copy_(self.slices.mine(full)) if id(tensor) in ours else here.copy_(full)


def local(tensors: list[Any]) -> list[Tensor]:
    """This rank's slices. (An engine may read them in inference mode, where a DTensor cannot be taken apart.)"""
    with torch.inference_mode(False), torch.no_grad():  # without gradients DTensor gives what it holds, which takes a tenth of the time
        return [tensor.to_local().detach() for tensor in tensors]

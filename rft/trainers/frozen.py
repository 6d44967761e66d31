"""Models that no optimizer trains: the Reference, a moving average of the Actor, and what they have in common with reward models.

They are sharded as an Actor under FSDP2 is, whatever the Actor's own backend, maybe over fewer ranks; they hold and compute in one dtype,
and have neither masters nor moments. While one is on the host its storages are empty, so models that take turns take the device memory
of the largest.
"""

import dataclasses as dc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from rft.errors import BadInput, RoleError
from rft.images import RowImages
from rft.models import ModelFolder, find_model
from rft.parallel.world import World
from rft.spec import FrozenSpec, MovingAverage, Reference
from rft.trainers import hugging_face
from rft.trainers.backend import Root
from rft.trainers.likeness import differences
from rft.trainers.loading import on_rank_0
from rft.trainers.microbatches import gather
from rft.trainers.passes import passes
from rft.trainers.protocol import Adapted, Frozen
from rft.trainers.scorer import bare_scorer, scorer
from rft.trainers.sharded import Sharded

T = TypeVar("T")


def build(spec: Reference | MovingAverage, actor: ModelFolder, world: World) -> Frozen:
    """Loads the model that the role begins with, and shards it. Collective. Raises `BadInput` on all ranks for what cannot work."""
    folder = on_every_rank(world, lambda: _beginning(spec, actor))
    root = on_rank_0(
        world,
        lambda: scorer(hugging_face.load(folder, checkpointing=False)),
        lambda layout: bare_scorer(hugging_face.empty(folder, checkpointing=False), layout),
    )
    return FrozenPolicy(root, spec, folder, world)


def base_of(spec: Reference, actor: Adapted) -> Frozen:
    """The Reference of an Actor with LoRA: what that computes without its adapter. Raises `BadInput` for a place or a model of its own."""
    asked = [f.name for f in dc.fields(spec) if f.name in ("model", "shards", "where") and getattr(spec, f.name) != f.default]
    if asked:
        raise BadInput(
            f"with LoRA the Reference is the Actor's base model, and is where the Actor is; leave out {', '.join(asked)} of Reference(…), "
            "or train without LoRA"
        )
    return BaseOfActor(actor)


class Still:
    """A sharded root that no optimizer moves, and how rows go through it; it goes to the host and back as a whole."""

    def __init__(self, root: Root, spec: FrozenSpec, world: World) -> None:
        _settle(root, getattr(torch, spec.dtype))
        self.passes = passes(root, world, dtype=spec.dtype, budget=spec.micro_batch_tokens)
        self.held = Sharded(root, world, dtype=spec.dtype, shards=spec.shards, keep_gathered=False)
        self._what = type(spec).__name__

    def offload(self) -> None:
        """See `Movable`."""
        self.held.weights.put()

    def reload(self) -> None:
        """See `Movable`."""
        self.held.weights.take()

    @property
    def bytes(self) -> int:
        """See `Movable`."""
        return self.held.weights.bytes

    def close(self) -> None:
        """Gives everything back. Idempotent."""
        self.held.close()

    def require_here(self) -> None:
        """Raises `RoleError` where it lies on the host."""
        if self.held.weights.away:
            raise RoleError(f"this {self._what} lies on the host; reload it first")


class FrozenPolicy(Still):
    """See `Frozen`."""

    def __init__(self, root: Root, spec: FrozenSpec, folder: ModelFolder, world: World) -> None:
        super().__init__(root, spec, world)
        self._folder = folder

    def logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        """See `Frozen`."""
        self.require_here()
        return self.passes.first(self.held, tokens, mask, wanted, temperature, images)

    def mix(self, weights: Iterator[tuple[str, Tensor]], share: float) -> None:
        """See `Frozen`. Each rank mixes its own slices, in their dtype, and lets go of one full tensor before it gets the next bucket."""
        self.require_here()
        slices, buffers = self._slices(), dict(self.held.buffers())
        for name, whole in weights:
            if name in slices:
                _mix(slices[name], self.held.slices.mine(whole), share)
            else:
                _mix(buffers[name], whole, share)

    def export(self, path: Path) -> None:
        """See `Frozen`."""
        hugging_face.export(path, self.held.whole(), self.held.root.model, self._folder, self.passes.world)

    def saved(self) -> dict[str, Tensor]:
        """See `Saved`."""
        slices = {n: self.held.slices.on_host(part, p.shape) for n, (p, part) in self.held.sliced().items()}
        return {**slices, **{n: buffer.detach().to("cpu", copy=True) for n, buffer in self.held.buffers()}}

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Saved`."""
        for name, part in self._slices().items():
            given: Any = tensors[name]
            _ = part.copy_(given.to_local())
        for name, buffer in self.held.buffers():
            _ = buffer.detach().copy_(tensors[name])

    def _slices(self) -> dict[str, Tensor]:
        return {name: part for name, (_, part) in self.held.sliced().items()}


class BaseOfActor:
    """See `Frozen`. It has no memory of its own, and is wherever the Actor is."""

    bytes = 0

    def __init__(self, actor: Adapted) -> None:
        self._actor = actor

    def logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        """See `Frozen`."""
        return self._actor.base_logprobs(tokens, mask, wanted, temperature, images)

    def offload(self) -> None:
        """Raises `RoleError`, as do the others: there is nothing to move, to train or to write."""
        raise RoleError("the base of an Actor with LoRA is moved with it, by offload_actor and reload_actor")

    def reload(self) -> None:
        """See `offload`."""
        self.offload()

    def mix(self, weights: Iterator[tuple[str, Tensor]], share: float) -> None:
        """See `offload`."""
        del weights, share
        raise RoleError("the base of an Actor with LoRA is never changed")

    def export(self, path: Path) -> None:
        """See `offload`."""
        del path
        raise RoleError("the base of an Actor with LoRA is LaunchSpec.model as it was; export the Actor, or take that")

    def saved(self) -> dict[str, Tensor]:
        """See `Saved`: nothing of its own."""
        return {}

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Saved`."""
        assert not tensors

    def close(self) -> None:
        """See `Frozen`: the Actor is closed by whoever has it."""


def on_every_rank(world: World, look: Callable[[], T]) -> T:
    """What `look` gives on this rank. Collective: raises `BadInput` on all ranks where it fails on any, which names those and why."""
    found, failure = None, None
    try:
        found = look()
    except Exception as error:  # noqa: BLE001 (it is told to all ranks, and raised on all)
        failure = error
    told = None if failure is None else str(failure) if isinstance(failure, BadInput) else f"{type(failure).__name__}: {failure}"
    all_told = gather(world, told)
    if any(all_told):
        alike = len(set(all_told)) == 1
        what = str(told) if alike else "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(all_told) if what)
        raise BadInput(what) from failure
    assert found is not None
    return found


def _beginning(spec: Reference | MovingAverage, actor: ModelFolder) -> ModelFolder:
    """What the role is loaded from. Raises `BadInput` for a Reference that does not stand beside this Actor."""
    if isinstance(spec, MovingAverage) or spec.model is None:
        return actor
    folder = find_model(spec.model)
    if apart := differences(folder, actor):
        raise BadInput(f"Reference.model {folder.path} is not of the kind of the Actor, {actor.path}: {'; '.join(apart)}")
    return folder


def _settle(root: Any, dtype: torch.dtype) -> None:
    """No gradient; and every parameter in the dtype of computing, one at a time. Buffers keep theirs: positions are rough in bf16."""
    exact = {id(p) for module in root.exact() for p in module.parameters()}
    for parameter in root.parameters():
        parameter.requires_grad_(False)
        if id(parameter) not in exact:
            parameter.data = parameter.data.to(dtype)


def _mix(here: Tensor, given: Tensor, share: float) -> None:
    """A weighted mean in the dtype of `here`; what counts something is taken as it is."""
    _ = here.lerp_(given.to(here), share) if here.is_floating_point() else here.copy_(given)

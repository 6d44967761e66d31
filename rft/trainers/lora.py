"""The Actor with an adapter: what is trained is A and B, and what the world is shown is W + alpha / rank · B A.

W is never written to. What is streamed and exported is added up anew each time, in fp32, from W and the adapter as they are.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from rft.errors import BadInput
from rft.images import RowImages
from rft.models import ModelFolder
from rft.narrow import UNCUT, Narrows, narrowed
from rft.parallel.world import World
from rft.spec import LoRA
from rft.trainers import adapter, hugging_face
from rft.trainers.actor import Actor
from rft.trainers.backend import Backend, Root, Wanted, every
from rft.trainers.microbatches import gather
from rft.trainers.passes import Passes
from rft.trainers.protocol import Sending, TensorSpec
from rft.trainers.scorer import Scorer

T = TypeVar("T")
BASE = "lora.base"
"""The name under which a checkpoint knows of what model the adapter is."""


def actor(root: Scorer, lora: LoRA, dtype: str, folder: ModelFolder, through: Passes, shard: Callable[[Root], Backend]) -> "LoRAActor":
    """Adapts a scorer that is not sharded yet, real on rank 0 at least, and shards it. Collective.

    Raises `BadInput` on all ranks for layers that are not there and for an adapter folder that does not fit, and `MissingBackend`.
    """
    world = through.world
    names = _on_all(world, lambda: adapter.layers(root.model, lora.targets))
    shapes = adapter.shapes(root.model, names, lora.rank)
    found = _on_all(world, lambda: adapter.read(Path(lora.adapter).expanduser(), lora, shapes) if lora.adapter else None)
    real = not any(parameter.is_meta for parameter in root.model.parameters())
    base = gather(world, adapter.fingerprint(root.model) if real else None)[0]
    assert base is not None

    def made(name: str) -> Tensor:
        if not real:
            return torch.empty(shapes[name], device="meta")
        return adapter.initial(name, shapes[name], lora.seed) if found is None else found[name]

    adapter.put_into(root.model, names, lora, made)
    for parameter in root.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, dtype), copy=True)  # a mapped file cannot be moved to the host and back
    return LoRAActor(shard(AdaptedScorer(root.model, root.layout)), through, folder, lora, base)


class AdaptedScorer(Scorer):
    """A scorer of a model that has been adapted."""

    def named(self) -> dict[str, Tensor]:
        """The checkpoint's tensors, and A and B directly before the weight that they are added to."""
        return adapter.named(self.model)


class LoRAActor(Actor):
    """See `Trainer`, and `Adapted` of `trainers.protocol`."""

    def __init__(self, backend: Backend, passes: Passes, folder: ModelFolder, lora: LoRA, base: int) -> None:
        super().__init__(backend, passes, folder)
        self._lora, self.base_fingerprint = lora, base

    # ---- all weights, W + scale · B A ----

    def manifest(self, dtype: torch.dtype | None = None) -> tuple[TensorSpec, ...]:
        """See `Trainer`. Nothing is cast before it is sent: the sum would be another one."""
        del dtype
        named = self._backend.root.named()
        adapted = {name for name in named if adapter.parts_of(name)[0] in named}
        return tuple(self._spec(n, t, torch.float32 if n in adapted else t.dtype) for n, t in named.items() if not adapter.is_part(n))

    def stream_weights(self, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()) -> Iterator[tuple[str, Tensor]]:
        """See `Trainer`, and `manifest`. All of a tensor is summed up before a part of it is given."""
        del dtype
        return narrowed(self._merged(self._backend.whole()), narrows[self.passes.world.rank] if narrows else UNCUT)

    def export(self, path: Path) -> None:
        """See `Trainer`: the model with the adapter added to it."""
        merged, root = self._merged(self._backend.masters()), self._backend.root
        hugging_face.export(path, merged, root.model, self._folder, self.passes.world)

    def _merged(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        pair: list[Tensor] = []
        for name, tensor in tensors:
            if adapter.is_part(name):
                pair.append(tensor)
            elif pair:
                yield name, _sum(tensor, *pair, scale=self._lora.scale, device=self.passes.world.device)
                pair.clear()
            else:
                yield name, tensor

    # ---- the base and the adapter apart ----

    def base_logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        """See `Adapted`."""
        with _without_adapter(self._backend.root.model):
            return self.logprobs(tokens, mask, wanted, temperature, images)

    def base(self, dtype: torch.dtype | None = None) -> Sending:
        """See `Adapted`."""
        return self._sending(lambda name: not adapter.is_part(name), dtype)

    def adapter(self) -> Sending:
        """See `Adapted`."""
        plain = self._sending(adapter.is_part)
        specs = tuple(TensorSpec(name=spec.name, shape=spec.shape, dtype=torch.float32) for spec in plain.manifest)
        return Sending(manifest=specs, tensors=((n, _scaled(n, t, self._lora.scale)) for n, t in plain.tensors))

    def export_adapter(self, path: Path) -> None:
        """See `Adapted`."""
        world = self.passes.world
        kept = {n: t.to("cpu", torch.float32, copy=True) for n, t in self._backend.masters(adapter.is_part) if world.rank == 0}
        hugging_face.on_rank_0(path, world, lambda: adapter.write(path, kept, self._lora, str(self._folder.path)))

    def _sending(self, wanted: Wanted = every, dtype: torch.dtype | None = None) -> Sending:
        named, comes_in = self._backend.root.named().items(), self._backend.comes_in
        specs = tuple(self._spec(n, t, comes_in(t, dtype)) for n, t in named if wanted(n))
        return Sending(manifest=specs, tensors=self._backend.whole(wanted, dtype))

    def _spec(self, name: str, tensor: Tensor, dtype: torch.dtype) -> TensorSpec:
        return TensorSpec(name=name, shape=tuple(self._backend.shape_of(tensor)), dtype=dtype)

    # ---- checkpoints ----

    def saved(self) -> dict[str, Tensor]:
        """See `Saved`: the adapter and its moments, and of which model it is."""
        return {**super().saved(), BASE: torch.tensor(self.base_fingerprint)}

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Saved`. Raises `BadInput` for an adapter of another model, before anything is taken."""
        if int(tensors[BASE]) != self.base_fingerprint:
            raise BadInput(f"the checkpoint has an adapter of another model than {self._folder.path}; launch with the model that it was of")
        super().install({name: tensor for name, tensor in tensors.items() if name != BASE})


def _on_all(world: World, found: Callable[[], T]) -> T:
    """What each rank finds, if all do. Collective. Raises `BadInput` on all where one does not."""
    value, failure = None, None
    try:
        value = found()
    except BadInput as error:
        failure = error
    problems = {problem for problem in gather(world, str(failure) if failure else None) if problem}
    if problems:
        raise BadInput("; ".join(sorted(problems))) from failure
    return value  # pyright: ignore[reportReturnType] (T may be None)


@torch.no_grad()
def _sum(weight: Tensor, a: Tensor, b: Tensor, *, scale: float, device: torch.device) -> Tensor:
    """W + scale · B A, in fp32 and in memory of its own."""
    w, a, b = (part.to(device, torch.float32) for part in (weight, a, b))
    return torch.addmm(w, b, a, alpha=scale)


@torch.no_grad()
def _scaled(name: str, part: Tensor, scale: float) -> Tensor:
    """A as it is, and scale · B: an engine that adds B A to W needs to know of no scale."""
    return part.float() * scale if name.endswith(".lora_B.weight") else part.float()


@contextlib.contextmanager
def _without_adapter(model: Any) -> Generator[None]:
    adapter.switch(model, on=False)
    try:
        yield
    finally:
        adapter.switch(model, on=True)

"""The embedded engine with an adapter of its own, which peft's layers add up in each forward pass."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rft.engines.delivery import Names, delivery, named
from rft.engines.protocol import Keeping
from rft.engines.transformers import Transformers, module_of
from rft.errors import EngineFailed
from rft.models import ModelFolder
from rft.ops.transfer import standing, transfer
from rft.parallel.world import World
from rft.spec import LoRA, TransformersEngine
from rft.trainers import adapter


def build(spec: TransformersEngine, model: ModelFolder, world: World, lora: LoRA) -> "AdaptedTransformers":
    """The engine with the folder's weights and no adapter yet. Raises as `transformers.build` does, and `BadInput` for unknown layers."""
    module = module_of(spec, model, world)
    names = adapter.layers(module, lora.targets)
    shapes = adapter.shapes(module, names, lora.rank)
    adapter.put_into(module, names, lora, lambda name: torch.empty(shapes[name], dtype=module.dtype))
    for name in names:
        module.get_submodule(name).scaling[adapter.NAME] = 1.0  # B comes scaled
    return AdaptedTransformers(module.to(world.device), model, max_model_len=spec.max_model_len, max_rows=spec.max_rows)


class AdaptedTransformers(Transformers):
    """See `AdapterEngine`."""

    def __init__(self, module: Any, model: ModelFolder, *, max_model_len: int, max_rows: int) -> None:
        super().__init__(module, model, max_model_len=max_model_len, max_rows=max_rows)
        self._parts = {names[0]: tensor for names, tensor in _plainly(module).items() if adapter.is_part(names[0])}
        self._part_shapes: dict[Names, torch.Size] = {(name,): tensor.shape for name, tensor in self._parts.items()}
        self._adapted = False

    @property
    def has_base(self) -> bool:
        """See `AdapterEngine`."""
        return self._weights == "loaded"

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """As without an adapter, which is to follow."""
        self._adapted = False
        return super().load(tensors)

    @torch.inference_mode()
    def load_adapter(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """Copies A and B into their places. Raises as `load` does."""
        with delivery(tensors, self._part_shapes, self.name) as stream:
            self._need_weights("load_adapter")
            self._adapted = False
            names = list[str]()
            sums = transfer(self._place(name, tensor, names) for name, tensor in stream)
        self._adapted = True
        return dict(zip(names, sums.tolist(), strict=True))

    @torch.inference_mode()
    def adapter_checksums(self) -> Mapping[str, int]:
        """Read from A and B where they lie."""
        self._need_weights("adapter_checksums")
        return dict(zip(self._parts, standing(list(self._parts.values())).tolist(), strict=True))

    def sleep(self, weights: Keeping) -> None:
        """As without an adapter, which stays and goes with the base."""
        super().sleep(weights)
        self._adapted = self._adapted and self._weights != "released"

    def _taken(self, module: Any) -> dict[Names, Tensor]:
        return {names: tensor for names, tensor in _plainly(module).items() if not adapter.is_part(names[0])}

    def _place(self, name: str, tensor: Tensor, names: list[str]) -> tuple[Tensor, Tensor]:
        names.append(name)
        return self._parts[name], tensor

    def _need(self, verb: str, *, cache: bool) -> None:
        super()._need(verb, cache=cache)
        if not self._adapted:
            raise EngineFailed(f"{verb}: the transformers engine has no adapter of its base yet; load_adapter first")


def _plainly(module: Any) -> dict[Names, Tensor]:
    """What an adapted model has, under the names that it has without."""
    return {tuple(map(adapter.plain, names)): tensor for names, tensor in named(module).items()}

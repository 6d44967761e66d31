"""vLLM with a place for one adapter, which is written to directly, as its weights are.

vLLM has slots of stacked A and B beside each layer, and finds the slot of a request by the id of its adapter. Every adapter that comes
gets a new id and a new name, and the one before it is forgotten: nothing that vLLM keeps under an id (slots) or a name (prefixes in the
cache) can be taken for it.
"""

import contextlib
import inspect
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rft.engines.delivery import Names, delivery
from rft.engines.protocol import Keeping
from rft.engines.vllm import VLLM, Started, start
from rft.errors import BadInput, EngineFailed
from rft.models import ModelFolder
from rft.ops.transfer import standing, transfer
from rft.parallel.world import World
from rft.spec import LoRA, VLLMEngine
from rft.trainers import adapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.worker.gpu_worker import Worker

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""For which vLLM has kernels; a lower one is padded with zeros."""


def build(spec: VLLMEngine, model: ModelFolder, world: World, lora: LoRA) -> "AdaptedVLLM":
    """The engine with no weights of meaning yet, and no adapter. Raises as `vllm.build` does, and `BadInput` for what has no place."""
    shapes = _shapes(model, lora)
    if lora.rank > RANKS[-1]:
        raise BadInput(f"vLLM takes adapters up to rank {RANKS[-1]}, not {lora.rank}; write LoRA(sync='merged')")
    if world.tp_size > 1:
        raise BadInput(f"an adapter alone needs tensor_parallel=1, got {world.tp_size}; write LoRA(sync='merged')")
    most = next(rank for rank in RANKS if rank >= lora.rank)
    started = start(spec, model, world, {"enable_lora": True, "max_loras": 1, "max_lora_rank": most, **_only(shapes)})
    with unwrapped(started.worker.get_model()):
        return AdaptedVLLM(started, spec, model, Slot(started.worker, shapes))


def _shapes(model: ModelFolder, lora: LoRA) -> dict[Names, torch.Size]:
    """Those of A and B, by name; nothing of the model's size is allocated."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(model.config)
    found = adapter.shapes(module, adapter.layers(module, lora.targets), lora.rank)
    return {(name,): torch.Size(shape) for name, shape in found.items()}


class Slot:
    """The one place for an adapter: views of vLLM's stacked A and B, by the names of what they take."""

    def __init__(self, worker: "Worker", shapes: Mapping[Names, torch.Size]) -> None:
        self.shapes = shapes
        self._manager: Any = worker.model_runner.lora_manager._adapter_manager
        self._manager.remove_all_adapters()
        self._views = {names[0]: view for names, view in self._found(shapes)}
        self.bytes = sum(stack.nbytes for layer in self._manager.modules.values() for each in _stacks(layer) for stack in each)
        self._count = 0

    @property
    def request(self) -> "LoRARequest":
        """What a request is to name, for the adapter that lies here."""
        from vllm.lora.request import LoRARequest

        name = f"version {self._count}"
        return LoRARequest(name, self._count, f"{name} is written to its place, and nowhere else")

    def install(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """A new adapter in place of the one that lies here. Returns the checksums of what came, cast."""
        from vllm.lora.lora_model import LoRAModel

        self._manager.remove_all_adapters()
        self._count += 1
        # Empty for its manager, which sets the slot to zeros, and takes the adapter for one that needs not be loaded.
        self._manager._registered_adapters[self._count] = LoRAModel(self._count, 0, {})
        self._manager.activate_adapter(self._count)
        names = list[str]()
        sums = transfer(self._place(name, tensor, names) for name, tensor in tensors)
        return dict(zip(names, sums.tolist(), strict=True))

    def checksums(self) -> Mapping[str, int]:
        """Of what lies here."""
        return dict(zip(self._views, standing(list(self._views.values())).tolist(), strict=True))

    def _place(self, name: str, tensor: Tensor, names: list[str]) -> tuple[Tensor, Tensor]:
        names.append(name)
        return self._views[name], tensor

    def _found(self, shapes: Mapping[Names, torch.Size]) -> Iterator[tuple[Names, Tensor]]:
        """Raises `BadInput` for a layer that has no place."""
        stacked = dict(self._stacked())
        for names, shape in shapes.items():
            place = stacked.get(names[0])
            own = None if place is None else place[tuple(slice(size) for size in shape)]
            if own is None or own.shape != shape:
                raise BadInput(f"vLLM has no place of shape {tuple(shape)} for {names[0]} in this model; write LoRA(sync='merged')")
            yield names, own

    def _stacked(self) -> Iterator[tuple[str, Tensor]]:
        """The places of the only slot, by name; where vLLM has several layers in one, each has its own."""
        for name, layer in self._manager.modules.items():
            each, a, b = self._manager.packed_modules.get(name, [name]), *_stacks(layer)
            if len(each) == len(a):
                yield from ((f"{own}.lora_A.weight", stack[0, 0]) for own, stack in zip(each, a, strict=True))
                yield from ((f"{own}.lora_B.weight", stack[0, 0]) for own, stack in zip(each, b, strict=True))


def _stacks(layer: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """vLLM's stacked A and B of a linear layer, one of each for every layer that it fuses; others have none of this form."""
    a, b = (getattr(layer, name, None) for name in ("lora_a_stacked", "lora_b_stacked"))
    return (a, b) if isinstance(a, tuple) and isinstance(b, tuple) else ((), ())


class AdaptedVLLM(VLLM):
    """See `AdapterEngine`."""

    def __init__(self, started: Started, spec: VLLMEngine, model: ModelFolder, slot: Slot) -> None:
        super().__init__(started, spec, model)
        self._bytes += slot.bytes
        self._slot, self._adapted = slot, False

    @property
    def has_base(self) -> bool:
        """See `AdapterEngine`."""
        return self._loaded

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """As without an adapter, which is to follow."""
        self._adapted = False
        with unwrapped(self._worker.get_model()):
            return super().load(tensors)

    @torch.inference_mode()
    def load_adapter(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """Writes A and B into vLLM's slot, under a new id. Raises as `load` does."""
        with delivery(tensors, self._slot.shapes, self.name) as stream:
            self._need_weights("load_adapter")
            self._adapted = False
            received = self._slot.install(stream)
        self._adapted = True
        return received

    @torch.inference_mode()
    def adapter_checksums(self) -> Mapping[str, int]:
        """Read from the slot."""
        self._need_weights("adapter_checksums")
        return self._slot.checksums()

    def sleep(self, weights: Keeping) -> None:
        """As without an adapter, which stays and goes with the base."""
        super().sleep(weights)
        self._adapted = self._adapted and weights == "keep"

    def _adapter(self) -> "LoRARequest":
        return self._slot.request

    def _need(self, verb: str) -> None:
        super()._need(verb)
        if not self._adapted:
            raise EngineFailed(f"{verb}: the vLLM engine has no adapter of its base yet; load_adapter first")


@contextlib.contextmanager
def unwrapped(model: nn.Module) -> Generator[None]:
    """The model as it is without adapters, while its weights are loaded: vLLM's own loading knows its layers by their plain names."""
    wrapped = list(_wrappers(model))
    for name, module in wrapped:
        _replace(model, name, module.base_layer)
    try:
        yield
    finally:
        for name, module in wrapped:
            _replace(model, name, module)


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost ones, by name."""
    from vllm.lora.layers import BaseLayerWithLoRA

    within: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA) and not name.startswith(within):
            within = (*within, f"{name}.")
            yield name, module


def _replace(model: nn.Module, name: str, module: Any) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _only(shapes: Mapping[Names, torch.Size]) -> dict[str, Any]:
    """The option that gives only these layers a place, where this version has it."""
    from vllm.engine.arg_utils import EngineArgs

    layers = sorted({names[0].split(".lora_")[0].rpartition(".")[2] for names in shapes})
    known = "lora_target_modules" in inspect.signature(EngineArgs).parameters
    return {"lora_target_modules": layers} if known else {}

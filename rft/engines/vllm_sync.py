"""How new weights get into vLLM: by the recorded plan where its layouts are plain copies, else by vLLM's own reload."""

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from rft.engines.delivery import Names
from rft.engines.plan import Load, NoPlan, Plan, record
from rft.engines.protocol import WHOLE
from rft.narrow import UNCUT
from rft.ops.checksum import checksum

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker

log = logging.getLogger("rft")
PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
PLAIN_MODULES = frozenset({"Attention", "MMEncoderAttention"})
"""vLLM's classes that compute with weights as they were loaded; any other with a step after loading may derive something from them."""


class PlanSync:
    """Writes every tensor straight to where it belongs."""

    path: Literal["plan", "reload"] = "plan"

    def __init__(self, plan: Plan, names: tuple[str, ...]) -> None:
        self._plan, self._names = plan, names
        self.casts_to, self.narrows = plan.casts_to, plan.narrows

    def install(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """Returns the checksums of what came, cast, as far as this rank holds it."""
        received = self._plan.install(tensors)
        self._names = tuple(received)
        return received

    def checksums(self) -> Mapping[str, int]:
        """Read from the places that the plan wrote to, by name."""
        return self._plan.checksums(self._names)


class ReloadSync:
    """Goes through vLLM's layer-wise reload, which packs or quantises each layer again.

    Its layout hides which bytes belong to which name, so there is one checksum for all of the memory: it shows what changes after
    loading ended, not what loading itself lost. The probe watches over that.
    """

    path: Literal["plan", "reload"] = "reload"
    casts_to: torch.dtype | None = None
    """What packs or quantises is given what is exact."""
    narrows = UNCUT

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    def install(self, tensors: Iterator[tuple[str, Tensor]]) -> Mapping[str, int]:
        """Returns the checksum of the memory after loading."""
        # Kept until a layer is complete, while the stream may reuse its own: so each is a copy.
        self._worker.reload_weights(weights_iterator=((name, tensor.clone()) for name, tensor in tensors))
        _process_tied(self._worker.get_model())
        return self.checksums()

    def checksums(self) -> Mapping[str, int]:
        """The sum over all parameters, modulo 2^63."""
        sums = [checksum(parameter) for parameter in self._worker.get_model().parameters()]
        return {WHOLE: int(torch.stack(sums).sum())}


def _process_tied(model: torch.nn.Module) -> None:
    """Does again, for a module that shares the weight of another, what vLLM does after loading it.

    The reload takes it for a module that got nothing, since the tensor came for the other; a packed head would stay the old one.
    """
    seen = set[int]()
    for module in model.modules():
        weight, method = getattr(module, "weight", None), getattr(module, "quant_method", None)
        if id(weight) in seen and method is not None:
            method.process_weights_after_loading(module)
        seen.add(id(weight))


def choose_sync(worker: "Worker", shapes: Mapping[Names, torch.Size], dtype: torch.dtype, *, plain: bool) -> PlanSync | ReloadSync:
    """The plan where loading is copying, and has been proved to be; else the reload. Says in the log which, and why."""
    try:
        plan = _plan(worker.get_model(), shapes, dtype, plain=plain)
    except NoPlan as reason:
        log.warning("vLLM takes new weights by its own reload, not by the recorded plan: %s", reason)
        return ReloadSync(worker)
    log.info("vLLM takes new weights by the recorded plan")
    return PlanSync(plan, tuple(names[0] for names in shapes))


def _plan(model: torch.nn.Module, shapes: Mapping[Names, torch.Size], dtype: torch.dtype, *, plain: bool) -> Plan:
    if not plain:
        raise NoPlan("this build packs the weights of linear layers")
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method not in PLAIN_METHODS | {"NoneType"}:
            raise NoPlan(f"{name} holds its weights in the layout of {method}")
        if hasattr(module, "process_weights_after_loading") and type(module).__name__ not in PLAIN_MODULES:
            raise NoPlan(f"{name or type(module).__name__} derives something from its weights after loading")
    try:
        load = cast(Load, model.load_weights)
        return record(load, shapes, dict(model.named_parameters()), dtype)
    except (AssertionError, AttributeError, KeyError, RuntimeError, ValueError) as error:
        # Whatever the engine's own loading raises when it is called once more: it differs by engine version and by model.
        raise NoPlan(f"its loading cannot be called again: {type(error).__name__}: {error}") from error

"""The Actor under DeepSpeed's ZeRO, stages 1 to 3: weights in the dtype of computing, fp32 masters and moments in flat shards.

Accumulation is ours (`managed_gradient_accumulation` off): every micro-batch's gradient is added up in fp32, whatever their number,
and the step that we call is the boundary. DeepSpeed averages gradients over the ranks, and objectives divide by the global batch
already, so losses are multiplied by the number of ranks. Its own skipping of gradients that are not finite is turned into an error.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rft.errors import BadInput, MissingBackend, NonFiniteGradient
from rft.models import ModelFolder
from rft.parallel.world import World
from rft.spec import DeepSpeedTrainer
from rft.trainers import deepspeed_state, hugging_face
from rft.trainers.actor import Actor
from rft.trainers.backend import Root
from rft.trainers.critic import ValueModel
from rft.trainers.gathering import Gathering, gathered
from rft.trainers.inputs import Inputs
from rft.trainers.passes import passes
from rft.trainers.protocol import Critic, Part, Trainer
from rft.trainers.schedule import learning_rate
from rft.trainers.scorer import scorer
from rft.trainers.shelf import Shelf
from rft.trainers.valuer import valuer

OLDEST = (0, 19, 8)
"""Before it gradients could not be accumulated over a number of micro-batches that changes."""
BUCKET = 50_000_000
"""Elements that are reduced together."""


def build(spec: DeepSpeedTrainer, folder: ModelFolder, world: World) -> Trainer:
    """Loads the model on every rank's host, and hands it to DeepSpeed. Collective.

    Raises `MissingBackend` where DeepSpeed is missing or too old, and `BadInput` for what cannot work.
    """
    deepspeed = _import()
    _require_device(deepspeed, world)
    root = scorer(hugging_face.load(folder, checkpointing=spec.gradient_checkpointing))
    through = passes(root, world, dtype=spec.dtype, budget=spec.micro_batch_tokens)
    return Actor(ZeRO(deepspeed, root, spec, world), through, folder)


def build_critic(spec: DeepSpeedTrainer, folder: ModelFolder, world: World) -> Critic:
    """The same for a value head on a model of its own."""
    deepspeed = _import()
    _require_device(deepspeed, world)
    root = valuer(folder, checkpointing=spec.gradient_checkpointing)
    through = passes(root, world, dtype=spec.dtype, budget=spec.micro_batch_tokens)
    return ValueModel(ZeRO(deepspeed, root, spec, world), through)


class ZeRO:
    """A root under DeepSpeed; see the module's head."""

    name = "deepspeed"

    def __init__(self, deepspeed: Any, root: Root, spec: DeepSpeedTrainer, world: World) -> None:
        self.root: Any = root
        self._deepspeed, self._spec, self._world = deepspeed, spec, world
        self.managed, self.steps = spec.offload_optimizer, 0
        self.parameters: list[Any] = list(self.root.parameters())
        self._engine: Any = _engine(deepspeed, self.root, self.parameters, spec)
        self._optimizer: Any = self._engine.optimizer
        deepspeed_state.make_moments(self._optimizer)
        self._weights = {id(p): self._own_part(p) for p in self.parameters}
        parts = deepspeed_state.parts(self._optimizer, list(self._weights.values()), on_host=spec.offload_optimizer)
        self.shelves: dict[Part, Shelf] = {part: Shelf(tensors) for part, tensors in parts.items()}
        self._wholes = parts["model"]

    # ---- computing ----

    def forward(self, asked: Inputs) -> tuple[Tensor, ...]:
        """See `Asked`."""
        return self._engine(asked)

    def training(self, mode: bool) -> None:
        """See `Asked`."""
        self._engine.train(mode)

    def after_passes(self) -> None:
        """Nothing stays gathered."""

    def before_micro_batch(self, *, last: bool) -> None:
        """Every micro-batch is alike."""

    def backward(self, loss: Tensor) -> None:
        """See `Backend`."""
        self._engine.backward(loss)

    def update(self) -> dict[str, float]:
        """DeepSpeed's own norm over all ranks, its clip, and AdamW on this rank's shard."""
        lr = learning_rate(self._spec, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        norm = float(self._optimizer._global_grad_norm)
        if self._optimizer.overflow or not math.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is infinite or nan at step {self.steps}; the optimizer was not touched")
        self.steps += 1
        return {"grad_norm": norm, "lr": lr}

    def forget(self) -> None:
        """See `Backend`."""
        deepspeed_state.forget_gradients(self._optimizer)

    # ---- weights ----

    def shape_of(self, tensor: Tensor) -> torch.Size:
        """See `Backend`."""
        return getattr(tensor, "ds_shape", tensor.shape)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend`."""
        named = self.root.named()
        yield from self._gathered([(n, named[n], part) for n, part in self._readable(named)])
        yield from ((n, t) for n, t in named.items() if id(t) not in self._weights)

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend`."""
        if self._spec.dtype == "float32":
            yield from self.whole()
            return
        for name, tensor in self.root.named().items():
            own = id(tensor) in self._weights
            yield name, self._deepspeed.utils.safe_get_full_fp32_param(tensor) if own else tensor

    def close(self) -> None:
        """See `Backend`."""
        if self._engine is not None:
            self._engine.destroy()
        for shelf in self.shelves.values():
            shelf.close()
        self.root = self._engine = self._optimizer = None
        self.parameters, self._weights, self._wholes = [], {}, []

    def _own_part(self, parameter: Any) -> Tensor:
        """What this rank holds of a parameter: in stage 3 a piece of it, laid out flat; below, all of it."""
        return parameter.ds_tensor.data if self._spec.stage == 3 else parameter.data

    def _readable(self, named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """This rank's parts by name, from the host's copy of their storage while they are away."""
        wholes = self.shelves["model"].readable()
        copies = {deepspeed_state.key(own): copy for own, copy in zip(self._wholes, wholes, strict=True)}
        for name, part in ((n, self._weights[id(t)]) for n, t in named.items() if id(t) in self._weights):
            copy = copies[deepspeed_state.key(part)]
            first = copy.storage_offset() + part.storage_offset()  # strides count from the storage's start, and copies share one
            yield name, torch.as_strided(copy, part.shape, part.stride(), first)

    def _gathered(self, parts: list[tuple[str, Any, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        if self._spec.stage < 3:
            yield from ((name, part) for name, _, part in parts)
            return
        everywhere = Gathering(group=None, size=self._world.size, device=self._world.device)
        shards = [(name, (len(part) * self._world.size,), part) for name, _, part in parts]
        for (name, flat), (_, parameter, _) in zip(gathered(shards, everywhere), parts, strict=True):
            yield name, flat[: parameter.ds_numel].view(parameter.ds_shape)


def _engine(deepspeed: Any, root: Any, parameters: list[Any], spec: DeepSpeedTrainer) -> Any:
    """DeepSpeed's engine around the scorer, with PyTorch's AdamW, which needs no compiler."""
    optimizer = torch.optim.AdamW(parameters, spec.lr, spec.betas, spec.eps, spec.weight_decay, fused=True)
    if spec.stage == 3:
        for parameter in (p for module in root.borrowed() for p in module.parameters()):
            deepspeed.zero.register_external_parameter(root, parameter)
    engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=_config(spec))
    return engine


def _config(spec: DeepSpeedTrainer) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": spec.stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if spec.stage == 3:
        zero["stage3_param_persistence_threshold"] = 0  # every weight lies in a shard, small ones too
    if spec.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if math.isinf(spec.max_grad_norm) else spec.max_grad_norm,
        "bf16": {"enabled": spec.dtype == "bfloat16", "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _import() -> Any:
    install = "pip install 'rft-runtime[deepspeed]' (DS_BUILD_OPS=0 builds none of its operators, and none is needed)"
    try:
        import deepspeed
    except ImportError as error:
        raise MissingBackend(f"DeepSpeed is not installed, or cannot be imported here ({error}): {install}") from error
    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
    if version < OLDEST:
        raise MissingBackend(f"DeepSpeed {deepspeed.__version__} is too old, 0.19.8 is needed: {install}")
    return deepspeed


def _require_device(deepspeed: Any, world: World) -> None:
    kind: str = deepspeed.accelerator.get_accelerator().device_name()
    if kind != world.device.type:
        raise BadInput(f"DeepSpeed has chosen {kind}, and this rank computes on {world.device}; set DS_ACCELERATOR={world.device.type}")

"""The Actor under DeepSpeed's ZeRO, stages 1 to 3: weights in the dtype of computing, fp32 masters and moments in flat shards.

Accumulation is ours (`managed_gradient_accumulation` off): every micro-batch's gradient is added up in fp32, whatever their number,
and the step that we call is the boundary. DeepSpeed averages gradients over the ranks, and objectives divide by the global batch
already, so losses are multiplied by the number of ranks. Its own skipping of gradients that are not finite is turned into an error.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rft.errors import BadInput, MissingBackend, NonFiniteGradient
from rft.models import ModelFolder
from rft.narrow import UNCUT, Narrows, narrowed
from rft.parallel.world import World
from rft.spec import DeepSpeedTrainer
from rft.trainers import deepspeed_state, hugging_face, lora
from rft.trainers.actor import Actor
from rft.trainers.backend import Root, Wanted, every
from rft.trainers.critic import ValueModel
from rft.trainers.deepspeed_state import MOMENTS, Held
from rft.trainers.gathering import assembled, gathered
from rft.trainers.inputs import Inputs
from rft.trainers.loading import on_rank_0, read, sent
from rft.trainers.passes import passes
from rft.trainers.pieces import Gathering, Piece
from rft.trainers.protocol import Critic, Part, Trainer
from rft.trainers.schedule import learning_rate
from rft.trainers.scorer import bare_scorer, scorer
from rft.trainers.shelf import Shelf
from rft.trainers.slices import Slices
from rft.trainers.valuer import bare_valuer, valuer

OLDEST = (0, 19, 8)
"""Before it gradients could not be accumulated over a number of micro-batches that changes."""
BUCKET = 50_000_000
"""Elements that are reduced together."""
KINDS = ("model", *MOMENTS)
"""What is saved of each parameter: its master, and the moments."""


def build(spec: DeepSpeedTrainer, folder: ModelFolder, world: World) -> Trainer:
    """Loads the model, and hands it to DeepSpeed. Collective.

    Rank 0 alone reads it. On the device each rank has all of the weights for a moment, in the dtype of computing: DeepSpeed cuts them
    there, in stage 3 too. Raises `MissingBackend` where DeepSpeed is missing or too old, and `BadInput` for what cannot work.
    """
    deepspeed = _import()
    _require_device(deepspeed, world)
    root = on_rank_0(
        world,
        lambda: scorer(hugging_face.load(folder, checkpointing=spec.gradient_checkpointing)),
        lambda layout: bare_scorer(hugging_face.empty(folder, checkpointing=spec.gradient_checkpointing), layout),
    )
    through = passes(root, world, dtype=spec.dtype, budget=spec.micro_batch_tokens)
    if spec.lora is not None:
        return lora.actor(root, spec.lora, spec.dtype, folder, through, lambda adapted: ZeRO(deepspeed, adapted, spec, world))
    return Actor(ZeRO(deepspeed, root, spec, world), through, folder)


def build_critic(spec: DeepSpeedTrainer, folder: ModelFolder, world: World) -> Critic:
    """The same for a value head on a model of its own."""
    deepspeed = _import()
    _require_device(deepspeed, world)
    root = on_rank_0(
        world,
        lambda: valuer(folder, checkpointing=spec.gradient_checkpointing),
        lambda layout: bare_valuer(folder, layout, checkpointing=spec.gradient_checkpointing),
    )
    through = passes(root, world, dtype=spec.dtype, budget=spec.micro_batch_tokens)
    return ValueModel(ZeRO(deepspeed, root, spec, world), through)


class ZeRO:
    """A root under DeepSpeed; see the module's head."""

    name = "deepspeed"

    def __init__(self, deepspeed: Any, root: Root, spec: DeepSpeedTrainer, world: World) -> None:
        self.root: Any = root
        self._deepspeed, self._spec, self._world = deepspeed, spec, world
        self.managed, self.steps = spec.offload_optimizer, 0
        whole = read(root, world)
        _give_memory(self.root, world, getattr(torch, spec.dtype))
        self.parameters: list[Any] = list(self.root.parameters())
        self._engine: Any = _engine(deepspeed, self.root, self.parameters, spec)
        self._optimizer: Any = self._engine.optimizer
        deepspeed_state.make_moments(self._optimizer)
        self._held = deepspeed_state.held(self._optimizer, self.parameters, rank=world.rank, ranks=world.size)
        parts = deepspeed_state.parts(self._optimizer, [held.weight for held in self._held.values()], on_host=spec.offload_optimizer)
        self.shelves: dict[Part, Shelf] = {part: Shelf(tensors) for part, tensors in parts.items()}
        self._slices, self._among = Slices(world, world.size), Gathering(group=None, size=world.size, device=world.device)
        self._hand_out(whole)
        self._listed: dict[str, Tensor] = self.root.named()
        deepspeed_state.release_room(self._optimizer)

    # ---- computing ----

    def forward(self, asked: Inputs) -> tuple[Tensor, ...]:
        """See `Asked`."""
        return self._engine(asked)

    def training(self, mode: bool) -> None:
        """See `Asked`."""
        self._engine.train(mode)
        if mode:
            deepspeed_state.make_room(self._optimizer)

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
        deepspeed_state.release_room(self._optimizer)

    # ---- weights and moments ----

    def shape_of(self, tensor: Tensor) -> torch.Size:
        """See `Backend`."""
        return getattr(tensor, "ds_shape", tensor.shape)

    def comes_in(self, tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
        """See `Backend`."""
        travels = self._spec.stage == 3 and id(tensor) in self._held
        return self._among.dtype_of(tensor.dtype, dtype if travels else None)

    def whole(
        self, wanted: Wanted = every, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """See `Backend`."""
        own = narrows[self._world.rank] if narrows else UNCUT
        if self._spec.stage == 3:
            yield from self._in_full("weight", wanted, dtype, narrows)
        else:
            yield from narrowed(((n, self._here(held.weight)) for n, held in self._named(wanted).items()), own)
        yield from narrowed(self._buffers(wanted), own)

    def masters(self, wanted: Wanted = every) -> Iterator[tuple[str, Tensor]]:
        """See `Backend`."""
        yield from self._in_full("model", wanted)
        yield from self._buffers(wanted)

    def saved(self) -> dict[str, Tensor]:
        """See `Saved`. What is not trained is not saved: it is what it was loaded as."""
        tensors: dict[str, Tensor] = {}
        for kind in KINDS:
            for n, whole in self._in_full(kind, self._learning()):
                tensors[_key(kind, n)] = self._slices.on_host(self._slices.mine(whole).float(), whole.shape)
        tensors |= {_key("model", n): t.to("cpu", copy=True) for n, t in self._buffers()}
        return {**tensors, "optimizer.steps": torch.tensor(self.steps)}

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Saved`."""
        named = self._named(self._learning())
        for kind in KINDS:
            slices: Any = {n: tensors[_key(kind, n)] for n, held in named.items() if kind in held.stretches}
            shards = [(n, tuple(named[n].shape), each.to_local()) for n, each in slices.items()]
            for n, whole in gathered(shards, self._among):
                self._write(named[n], kind, whole)
        for n, t in self._buffers():
            _ = t.copy_(tensors[_key("model", n)])
        self.steps = int(tensors["optimizer.steps"])
        deepspeed_state.set_steps(self._optimizer, self.steps)

    def close(self) -> None:
        """See `Backend`."""
        if self._engine is not None:
            self._engine.destroy()
        for shelf in self.shelves.values():
            shelf.close()
        self.root = self._engine = self._optimizer = None
        self.parameters, self._held, self._listed = [], {}, {}

    def _learning(self) -> Wanted:
        return {n for n, t in self._listed.items() if t.requires_grad}.__contains__

    def _named(self, wanted: Wanted = every) -> dict[str, Held]:
        return {n: self._held[id(t)] for n, t in self._listed.items() if id(t) in self._held and wanted(n)}

    def _buffers(self, wanted: Wanted = every) -> Iterator[tuple[str, Tensor]]:
        yield from ((n, t) for n, t in self._listed.items() if id(t) not in self._held and wanted(n))

    def _here(self, tensor: Tensor) -> Tensor:
        """A tensor of this rank's, on the host while it is away."""
        return self.shelves["optimizer"].here(self.shelves["model"].here(tensor))

    def _in_full(
        self, kind: str, wanted: Wanted = every, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Everything of one kind, gathered."""
        parts = ((n, held, held.stretches[kind]) for n, held in self._named(wanted).items() if kind in held.stretches)
        pieces = (Piece(name=n, shape=held.shape, bounds=held.bounds, own=self._here(own)) for n, held, own in parts)
        yield from assembled(pieces, self._among, dtype, narrows)

    def _hand_out(self, whole: Mapping[str, Tensor]) -> None:
        """Each rank keeps its part of what rank 0 has, in fp32: DeepSpeed makes masters of what computes, rounded as that is."""
        for _, tensor, full in sent(self.root, whole, self._world, torch.float32):
            if id(tensor) in self._held:
                self._write(self._held[id(tensor)], "model", full)
            else:
                _ = tensor.copy_(full)

    def _write(self, held: Held, kind: str, whole: Tensor) -> None:
        """This rank's part of a whole tensor; what computes follows its master."""
        first, end = held.bounds[self._world.rank]
        own = whole.reshape(-1)[first:end]
        _ = self._here(held.stretches[kind]).copy_(own)
        if kind == "model" and self._spec.stage == 3:
            _ = self._here(held.stretches["weight"]).copy_(own)
        elif kind == "model":
            _ = self._here(held.weight).copy_(whole)


def _key(kind: str, name: str) -> str:
    return f"model.{name}" if kind == "model" else f"optimizer.{kind}.{name}"


def _give_memory(root: Any, world: World, dtype: torch.dtype) -> None:
    """To parameters that have none yet, as the same objects: a tied one stays tied."""
    for parameter in (p for p in root.parameters() if p.is_meta):
        there = torch.empty_like(parameter, dtype=dtype, device=world.device)
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(there, requires_grad=parameter.requires_grad))


def _engine(deepspeed: Any, root: Any, parameters: list[Any], spec: DeepSpeedTrainer) -> Any:
    """DeepSpeed's engine around the scorer, with PyTorch's AdamW, which needs no compiler."""
    trained = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, spec.lr, spec.betas, spec.eps, spec.weight_decay, fused=True)
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
    # On a CPU it would compile this one when it starts, for a minute; and an interrupted compilation locks out all later ones.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _require_device(deepspeed: Any, world: World) -> None:
    kind: str = deepspeed.accelerator.get_accelerator().device_name()
    if kind != world.device.type:
        raise BadInput(f"DeepSpeed has chosen {kind}, and this rank computes on {world.device}; set DS_ACCELERATOR={world.device.type}")

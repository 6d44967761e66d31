"""The Actor under PyTorch's `fully_shard`: fp32 masters and moments in shards, computing in the dtype asked for.

Every rank holds a slice of every parameter, of its gradient and of its moments. In a step with `keep_gathered` the blocks are
gathered once and stay so over all micro-batches; gradients add up in fp32 on each rank and are reduced once, with the last
micro-batch. Without it every block is sharded again after use, and every micro-batch's gradient is reduced at once: less memory for
more traffic. Objectives divide by the global batch, so gradients are summed over ranks.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import get_total_norm

from rft.errors import NonFiniteGradient
from rft.models import ModelFolder
from rft.parallel.world import World
from rft.spec import FSDP2Trainer
from rft.trainers import hugging_face
from rft.trainers.actor import ActorTrainer
from rft.trainers.gathering import gathered
from rft.trainers.gloo import GlooReduceScatter
from rft.trainers.protocol import Trainer
from rft.trainers.schedule import learning_rate
from rft.trainers.scorer import Scorer
from rft.trainers.shelf import Shelf


def build(spec: FSDP2Trainer, model: ModelFolder, world: World) -> Trainer:
    """Loads the model on every rank's host, and shards it over the whole world. Collective. Raises `BadInput` for what cannot work."""
    return _FSDP2(spec, model, world)


class _FSDP2(ActorTrainer):
    name = "fsdp2"

    def __init__(self, spec: FSDP2Trainer, folder: ModelFolder, world: World) -> None:
        super().__init__(spec, folder, world)
        self._spec = spec
        _shard(self._scorer, spec, world)
        self._sharded = [module for module in self._scorer.modules() if isinstance(module, FSDPModule)]
        self._parameters: list[Any] = list(self._model.parameters())
        self._optimizer: Any = _adamw(self._parameters, spec)
        moments = [self._optimizer.state[p][name] for p in self._parameters for name in ("exp_avg", "exp_avg_sq")]
        self._shelves = {"model": Shelf(_local(self._parameters)), "optimizer": Shelf(_local(moments))}
        self._steps = 0

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        tensors = self._model.state_dict(keep_vars=True)
        here = dict(zip(map(id, self._parameters), self._shelves["model"].readable(), strict=True))
        names = hugging_face.checkpoint_names(self._model)
        split = sum(id(tensors[n]) in here for n in names)
        yield from gathered([(n, tuple(tensors[n].shape), here[id(tensors[n])]) for n in names[:split]], self._world)
        yield from ((n, tensors[n]) for n in names[split:])

    def _before_micro_batch(self, *, last: bool) -> None:
        if self._spec.keep_gathered:
            self._scorer.set_reshard_after_backward(last)
            self._scorer.set_requires_gradient_sync(last)

    def _backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def _update(self) -> dict[str, float]:
        """One global norm over all parameters, the clip, and AdamW."""
        gradients = _local([p.grad for p in self._parameters if p.grad is not None])
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm} at step {self._steps}; the optimizer was not touched")
        if norm > self._spec.max_grad_norm:
            for gradient in gradients:
                _ = gradient.mul_(self._spec.max_grad_norm / norm)
        lr = learning_rate(self._spec, self._steps)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self._steps += 1
        return {"grad_norm": norm, "lr": lr}

    def _norm(self, gradients: list[Tensor]) -> float:
        square = get_total_norm(gradients).double().square().cpu()
        _ = dist.all_reduce(square, group=self._world.host)
        return float(square.sqrt())

    def _forget(self) -> None:
        self._optimizer.zero_grad()

    def _after_passes(self) -> None:
        # What a forward without gradient gathered stays gathered, as does the root, until somebody says otherwise.
        for module in self._sharded:
            module.reshard()

    def close(self) -> None:
        self._optimizer, self._parameters, self._sharded = None, [], []
        super().close()


def _shard(root: Scorer, spec: FSDP2Trainer, world: World) -> None:
    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in [*hugging_face.blocks(root.model), root]:
        # What the scorer itself is given is to keep its dtype: temperatures are fp32.
        dtypes: dict[str, Any] = {"param_dtype": getattr(torch, spec.dtype), "reduce_dtype": torch.float32}
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=module is not root)
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not spec.keep_gathered)
        if world.device.type == "cpu" and world.size > 1:
            sharded.set_custom_reduce_scatter(GlooReduceScatter())


def _adamw(parameters: list[Any], spec: FSDP2Trainer) -> Any:
    """AdamW with its moments there from the start, so that what it takes is known before the first step."""
    optimizer = torch.optim.AdamW(parameters, spec.lr, spec.betas, spec.eps, spec.weight_decay, fused=True)
    for p in parameters:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def _local(tensors: list[Any]) -> list[Tensor]:
    return [tensor.detach().to_local() for tensor in tensors]

"""Training under PyTorch's `fully_shard`: fp32 masters and moments in shards, computing in the dtype asked for.

Every rank holds a slice of every parameter, of its gradient and of its moments. In a step with `keep_gathered` the blocks are
gathered once and stay so over all micro-batches; gradients add up in fp32 on each rank and are reduced once, with the last
micro-batch. Without it every block is sharded again after use, and every micro-batch's gradient is reduced at once: less memory for
more traffic. Objectives divide by the global batch, so gradients are summed over ranks.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from rft.errors import NonFiniteGradient
from rft.models import ModelFolder
from rft.parallel.world import World
from rft.spec import FSDP2Trainer
from rft.trainers import hugging_face, lora
from rft.trainers.actor import Actor
from rft.trainers.adamw import MOMENTS, adamw
from rft.trainers.backend import Root, Wanted, every
from rft.trainers.critic import ValueModel
from rft.trainers.loading import on_rank_0
from rft.trainers.passes import passes
from rft.trainers.protocol import Critic, Part, Trainer
from rft.trainers.schedule import learning_rate
from rft.trainers.scorer import bare_scorer, scorer
from rft.trainers.sharded import Sharded, local
from rft.trainers.shelf import Shelf
from rft.trainers.slices import require_divisor
from rft.trainers.valuer import bare_valuer, valuer


def build(spec: FSDP2Trainer, folder: ModelFolder, world: World) -> Trainer:
    """Loads the model, and shards it. Collective. Raises `BadInput` for what cannot work."""
    require_divisor(world, spec.shards or world.size)
    root = on_rank_0(
        world,
        lambda: scorer(hugging_face.load(folder, checkpointing=spec.gradient_checkpointing)),
        lambda layout: bare_scorer(hugging_face.empty(folder, checkpointing=spec.gradient_checkpointing), layout),
    )
    through = passes(root, world, dtype=spec.dtype, budget=spec.micro_batch_tokens)
    if spec.lora is not None:
        return lora.actor(root, spec.lora, spec.dtype, folder, through, lambda adapted: FSDP2(adapted, spec, world))
    return Actor(FSDP2(root, spec, world), through, folder)


def build_critic(spec: FSDP2Trainer, folder: ModelFolder, world: World) -> Critic:
    """The same for a value head on a model of its own."""
    require_divisor(world, spec.shards or world.size)
    root = on_rank_0(
        world,
        lambda: valuer(folder, checkpointing=spec.gradient_checkpointing),
        lambda layout: bare_valuer(folder, layout, checkpointing=spec.gradient_checkpointing),
    )
    through = passes(root, world, dtype=spec.dtype, budget=spec.micro_batch_tokens)
    return ValueModel(FSDP2(root, spec, world), through)


class FSDP2(Sharded):
    """A sharded root with AdamW; see the module's head."""

    name = "fsdp2"

    def __init__(self, root: Root, spec: FSDP2Trainer, world: World) -> None:
        super().__init__(root, world, dtype=spec.dtype, shards=spec.shards, keep_gathered=spec.keep_gathered, on_host=spec.offload)
        self._spec, self.managed, self.steps = spec, spec.offload, 0
        self._trained = [p for p in self.parameters if p.requires_grad]
        self._optimizer: Any = adamw(self._trained, spec)
        self._moments = Shelf([] if spec.offload else local([self._state(p)[m] for p in self._trained for m in MOMENTS]))
        self.shelves: dict[Part, Shelf] = {"model": self.weights, "optimizer": self._moments}

    # ---- computing ----

    def before_micro_batch(self, *, last: bool) -> None:
        """See `Backend`."""
        if self._spec.keep_gathered:
            self.root.set_reshard_after_backward(last)
            self.root.set_requires_gradient_sync(last)

    def backward(self, loss: Tensor) -> None:
        """See `Backend`."""
        torch.autograd.backward(loss)

    def update(self) -> dict[str, float]:
        """One global norm over all parameters, the clip, and AdamW."""
        gradients = local([p.grad for p in self._trained if p.grad is not None])
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm} at step {self.steps}; the optimizer was not touched")
        if norm > self._spec.max_grad_norm:
            for gradient in gradients:
                _ = gradient.mul_(self._spec.max_grad_norm / norm)
        lr = learning_rate(self._spec, self.steps)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self.steps += 1
        return {"grad_norm": norm, "lr": lr}

    def _norm(self, gradients: list[Tensor]) -> float:
        square = get_total_norm(gradients).double().square().cpu()
        _ = dist.all_reduce(square, group=self._world.host)
        return float((square / (self._world.size // self._count)).sqrt())  # each slice is there once in every group of shards

    def forget(self) -> None:
        """See `Backend`."""
        self._optimizer.zero_grad()

    # ---- weights and moments ----

    def masters(self, wanted: Wanted = every) -> Iterator[tuple[str, Tensor]]:
        """See `Backend`."""
        return self.whole(wanted)

    def saved(self) -> dict[str, Tensor]:
        """See `Saved`. What is not trained is not saved: it is what it was loaded as."""
        sliced, on_host = self._learning(), self.slices.on_host
        tensors: dict[str, Tensor] = {f"model.{n}": on_host(part, p.shape) for n, (p, part) in sliced.items()}
        for m in MOMENTS:
            parts = self._moment_parts(m)
            tensors |= {f"optimizer.{m}.{n}": on_host(parts[id(p)], p.shape) for n, (p, _) in sliced.items() if id(p) in parts}
        tensors |= {f"model.{n}": t.to("cpu", copy=True) for n, t in self.buffers()}
        return {**tensors, "optimizer.steps": torch.tensor(self.steps)}

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Saved`."""
        sliced = self._learning()
        for n, (_, part) in sliced.items():
            _ = part.copy_(_part(tensors[f"model.{n}"]))
        for m in MOMENTS:
            parts = self._moment_parts(m)
            for n, p in ((n, p) for n, (p, _) in sliced.items() if id(p) in parts):
                _ = parts[id(p)].copy_(_part(tensors[f"optimizer.{m}.{n}"]))
        for n, t in self.buffers():
            _ = t.copy_(tensors[f"model.{n}"])
        self.steps = int(tensors["optimizer.steps"])
        for p in self._trained:
            _ = self._state(p)["step"].fill_(self.steps)

    def close(self) -> None:
        """See `Backend`."""
        self._moments.close()
        self._optimizer, self._trained = None, []
        super().close()

    def _learning(self) -> dict[str, tuple[Any, Tensor]]:
        return {n: (p, part) for n, (p, part) in self.sliced().items() if p.requires_grad}

    def _state(self, parameter: Any) -> dict[str, Any]:
        return self._optimizer.state[parameter]

    def _moment_parts(self, moment: str) -> dict[int, Tensor]:
        """This rank's slices by the identity of their parameters, from the host while they are away."""
        parts = local([self._state(p)[moment] for p in self._trained])
        return {id(p): self._moments.here(part) for p, part in zip(self._trained, parts, strict=True)}


def _part(tensor: Any) -> Tensor:
    return tensor.to_local()

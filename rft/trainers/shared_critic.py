"""A value head on the Actor's hidden states, which it reads without a gradient and never moves.

The head is small: every rank holds all of it, and its AdamW. Gradients are added up in rank order on every rank, so that all heads stay
the same to the last bit.
"""

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rft.errors import BadInput, NonFiniteGradient
from rft.parallel.world import World
from rft.spec.roles import SharedCritic
from rft.trainers import protocol
from rft.trainers.adamw import MOMENTS, adamw
from rft.trainers.critic import ValueModel
from rft.trainers.inputs import Inputs
from rft.trainers.microbatches import gather
from rft.trainers.passes import Readable
from rft.trainers.protocol import Part
from rft.trainers.schedule import learning_rate
from rft.trainers.shelf import Shelf
from rft.trainers.valuer import HEAD, ValueHead


def build(spec: SharedCritic, actor: protocol.Trainer, world: World) -> protocol.Critic:
    """The head, and its optimizer. Raises `BadInput` for a trainer that does not give its hidden states."""
    if not isinstance(actor, Readable):
        raise BadInput(f"SharedCritic reads the Actor's hidden states, and the trainer {actor.name} gives none; take Critic(…) instead")
    return ValueModel(SharedHead(actor, spec, world), actor.passes)


class SharedHead:
    """See the module's head."""

    name = "shared"

    def __init__(self, actor: Readable, spec: SharedCritic, world: World) -> None:
        self._actor, self._spec, self._world, self.steps = actor, spec, world, 0
        self.head: Any = ValueHead(actor.passes.width).to(world.device)
        self._optimizer: Any = adamw([self.head.weight], spec)
        state = self._optimizer.state[self.head.weight]
        self._parts: dict[str, Tensor] = {f"optimizer.{m}.{HEAD}": state[m] for m in MOMENTS}
        shelves = {"model": [self.head.weight.detach()], "optimizer": [*self._parts.values()]}
        self._parts[f"model.{HEAD}"] = self.head.weight.detach()
        self.shelves: dict[Part, Shelf] = {"model": Shelf(shelves["model"]), "optimizer": Shelf(shelves["optimizer"])}

    # ---- computing ----

    def forward(self, asked: Inputs) -> tuple[Tensor, ...]:
        """See `Asked`."""
        return (self.head(self._actor.hidden(asked)),)

    def training(self, mode: bool) -> None:
        """The head is the same in both, and the Actor is only read."""

    def after_passes(self) -> None:
        """See `Asked`."""
        self._actor.after_passes()

    def before_micro_batch(self, *, last: bool) -> None:
        """Every micro-batch is alike."""

    def backward(self, loss: Tensor) -> None:
        """See `Steps`."""
        torch.autograd.backward(loss)

    def update(self) -> dict[str, float]:
        """Adds up the gradients of all ranks; then the clip, and AdamW."""
        weight = self.head.weight
        # Losses come multiplied by the number of ranks, as for backends that average.
        total = functools.reduce(operator.add, gather(self._world, weight.grad.cpu())) / self._world.size
        norm = float(total.norm())
        if not math.isfinite(norm):
            raise NonFiniteGradient(f"the gradient's norm is {norm} at step {self.steps}; the optimizer was not touched")
        _ = weight.grad.copy_(total * min(1.0, self._spec.max_grad_norm / norm) if norm else total)
        lr = learning_rate(self._spec, self.steps)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self.steps += 1
        return {"grad_norm": norm, "lr": lr}

    def forget(self) -> None:
        """See `Steps`."""
        self._optimizer.zero_grad()

    # ---- weight and moments ----

    def saved(self) -> dict[str, Tensor]:
        """See `Saved`."""
        tensors = {name: part.to("cpu", copy=True) for name, part in self._readable().items()}
        return {**tensors, "optimizer.steps": torch.tensor(self.steps)}

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Saved`."""
        for name, part in self._readable().items():
            _ = part.copy_(tensors[name])
        self.steps = int(tensors["optimizer.steps"])
        _ = self._optimizer.state[self.head.weight]["step"].fill_(self.steps)

    def close(self) -> None:
        """See `Steps`."""
        for shelf in self.shelves.values():
            shelf.close()
        self.head, self._optimizer, self._parts = None, None, {}

    def _readable(self) -> dict[str, Tensor]:
        """By name, from the host's copies while they are away."""
        shelves = {name: self.shelves["model" if name.startswith("model.") else "optimizer"] for name in self._parts}
        return {name: shelves[name].here(part) for name, part in self._parts.items()}

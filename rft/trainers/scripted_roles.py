"""Models beside a scripted Actor, for property tests: exact, instant, and like the real ones of no use while they are on the host."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from rft.engines.faults import Faults
from rft.engines.scripted import scripted_logprob
from rft.experience import Minibatch, Rollouts
from rft.images import RowImages
from rft.objectives import ValueObjective
from rft.trainers.protocol import Part


class ScriptedRole:
    """Something that is moved as a whole, and claims to take `size` bytes on the device."""

    def __init__(self, faults: Faults, size: int) -> None:
        self.faults, self.size, self.on_device = faults, size, True

    def offload(self) -> None:
        self._move("offload", False)

    def reload(self) -> None:
        self._move("reload", True)

    @property
    def bytes(self) -> int:
        return self.size

    def close(self) -> None:
        self.on_device = False

    def used(self, verb: str, *, writes: bool = False) -> None:
        """Passes a point of failure. Raises where it is on the host, as a real one would crash."""
        self.faults.pass_by("trainer", verb, writes=writes)
        if not self.on_device:
            raise RuntimeError(f"{verb}: it is on the host")

    def _move(self, verb: str, to_device: bool) -> None:
        for _ in range(2):
            self.faults.pass_by("trainer", verb, writes=True)
            self.on_device = to_device


class ScriptedFrozen(ScriptedRole):
    """A `Frozen` with the weights of a scripted trainer before its first step: 0."""

    def __init__(self, faults: Faults, size: int = 64) -> None:
        super().__init__(faults, size)
        self.weights = {"body": torch.zeros(2), "head": torch.zeros(1)}

    def logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        del mask
        assert images is None, "three numbers see nothing"
        self.used("logprobs")
        total, values = sum(float(tensor.sum()) for tensor in self.weights.values()), torch.zeros(tokens.shape)
        for row, column in wanted.nonzero().tolist():
            values[row, column] = scripted_logprob(total, tuple(tokens[row, : column + 1].tolist())) / temperature
        return values

    def mix(self, weights: Iterator[tuple[str, Tensor]], share: float) -> None:
        self.used("mix", writes=True)
        for name, tensor in weights:
            self.weights[name] = (1 - share) * self.weights[name] + share * tensor

    def export(self, path: Path) -> None:
        self.faults.pass_by("trainer", "export", writes=False)
        path.mkdir(parents=True, exist_ok=True)
        torch.save(self.weights, path / "weights.pt")

    def saved(self) -> dict[str, Tensor]:
        self.faults.pass_by("trainer", "saved", writes=False)
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        self.faults.pass_by("trainer", "install", writes=True)
        self.weights = {name: tensors[name].clone() for name in self.weights}


class ScriptedJudge(ScriptedRole):
    """A `Judge` whose score is the sum of a row's tokens."""

    def __init__(self, faults: Faults, size: int = 32) -> None:
        super().__init__(faults, size)

    def scores(self, rollouts: Rollouts) -> Float32[Tensor, "batch"]:
        self.used("scores")
        return (rollouts.tokens * rollouts.mask).sum(dim=1).float()


class ScriptedCritic:
    """A `Critic` whose value is the number of steps that it has taken."""

    name = "scripted critic"

    def __init__(self, faults: Faults) -> None:
        self.parts: dict[Part, ScriptedRole] = {"model": ScriptedRole(faults, 48), "optimizer": ScriptedRole(faults, 80)}
        self.steps = torch.zeros(())

    def values(
        self, tokens: Int64[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], wanted: Bool[Tensor, "batch seq"]
    ) -> Float32[Tensor, "batch seq"]:
        del tokens, mask
        self.parts["model"].used("values")
        return self.steps * wanted

    def step(self, batch: Minibatch, objective: ValueObjective) -> dict[str, float]:
        del batch, objective
        for part in self.parts.values():
            part.used("step", writes=True)
        self.steps = self.steps + 1
        return {"loss": 0.0, "grad_norm": 1.0, "lr": 1.0}

    def offload(self, part: Part) -> None:
        self.parts[part].offload()

    def reload(self, part: Part) -> None:
        self.parts[part].reload()

    def bytes(self, part: Part) -> int:
        return self.parts[part].bytes

    def saved(self) -> dict[str, Tensor]:
        self.parts["model"].faults.pass_by("trainer", "saved", writes=False)
        return {"steps": self.steps.clone()}

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        self.parts["model"].faults.pass_by("trainer", "install", writes=True)
        self.steps = tensors["steps"].clone()

    def close(self) -> None:
        for part in self.parts.values():
            part.close()

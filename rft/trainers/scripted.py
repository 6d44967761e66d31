"""A trainer whose weights are three numbers: for property tests of steps and loops, exact and instant.

Each optimizer step adds 1 to every weight. It refuses to compute while it is offloaded, as a real one would crash.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from rft.engines.faults import Faults
from rft.engines.scripted import VOCABULARY, scripted_logprob
from rft.errors import RoleError
from rft.experience import Minibatch
from rft.images import RowImages
from rft.narrow import Narrows
from rft.objectives import MicroBatch, Objective, TokenScores
from rft.ops.metrics import read
from rft.parallel.batches import totals
from rft.trainers.microbatches import share_of
from rft.trainers.protocol import Part, TensorSpec


class ScriptedTrainer:
    """See the module's head. `sizes` are the bytes that its parts claim to take on the device."""

    name = "scripted"
    dtype = torch.float32
    managed = False

    def __init__(self, faults: Faults, *, sizes: dict[Part, int] | None = None) -> None:
        self.weights = {"body": torch.zeros(2), "head": torch.zeros(1)}
        self.moments = torch.zeros(3)
        self.on_device: dict[Part, bool] = {"model": True, "optimizer": True}
        self.faults, self.sizes = faults, sizes or {"model": 128, "optimizer": 256}

    def manifest(self, dtype: torch.dtype | None = None) -> tuple[TensorSpec, ...]:
        del dtype  # nothing is sent from rank to rank
        self._pass("manifest", writes=False)
        return tuple(TensorSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in self.weights.items())

    def stream_weights(self, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()) -> Iterator[tuple[str, Tensor]]:
        del dtype
        assert not any(narrows), "an engine of three numbers takes them whole"
        for name, tensor in self.weights.items():
            self._pass("stream_weights", writes=False)
            yield name, tensor

    def logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        assert images is None, "three numbers see nothing"
        self._pass("logprobs", writes=False)
        return self._logprobs(tokens, mask) * wanted / temperature

    def step(self, batch: Minibatch, old: Float32[Tensor, "batch seq"] | None, objective: Objective) -> dict[str, float]:
        self._pass("step")
        if not self.on_device["optimizer"]:
            raise RuntimeError("the optimizer is offloaded")
        new = (self._logprobs(batch.tokens, batch.mask) * batch.sampled).requires_grad_()
        scores = TokenScores(logprobs=new, entropy=torch.zeros_like(new))
        whole = totals([share_of(batch.tokens, batch.mask, batch.sampled, batch.demonstrated, vocab=VOCABULARY).rows])
        terms = objective(scores, MicroBatch(rows=batch, old=old), whole)
        self.weights = {name: tensor + 1 for name, tensor in self.weights.items()}
        self._pass("step")
        self.moments = self.moments + 1
        return {"loss": terms.loss.item(), "grad_norm": 1.0, "lr": 1.0, **read(terms.metrics)}

    def offload(self, part: Part) -> None:
        self._move(part, False)

    def reload(self, part: Part) -> None:
        self._move(part, True)

    def bytes(self, part: Part) -> int:
        self._pass("bytes", writes=False)
        return self.sizes[part]

    def saved(self) -> dict[str, Tensor]:
        self._pass("saved", writes=False)
        if not self.on_device["optimizer"]:
            raise RoleError("saved: the optimizer must be on the device")
        return {**{f"model.{name}": tensor.clone() for name, tensor in self.weights.items()}, "optimizer.moments": self.moments.clone()}

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        self._pass("install")
        self.weights = {name: tensors[f"model.{name}"].clone() for name in self.weights}
        self._pass("install")
        self.moments = tensors["optimizer.moments"].clone()

    def export(self, path: Path) -> None:
        self._pass("export", writes=False)
        path.mkdir(parents=True, exist_ok=True)
        torch.save(self.weights, path / "weights.pt")

    def close(self) -> None:
        self.on_device = {"model": False, "optimizer": False}

    def _logprobs(self, tokens: Tensor, mask: Tensor) -> Float32[Tensor, "batch seq"]:
        if not self.on_device["model"]:
            raise RuntimeError("the model is offloaded")
        total = sum(float(tensor.sum()) for tensor in self.weights.values())
        values = torch.zeros(tokens.shape)
        for row, (ids, length) in enumerate(zip(tokens.tolist(), mask.sum(1).tolist(), strict=True)):
            for end in range(1, length):
                values[row, end] = scripted_logprob(total, tuple(ids[: end + 1]))
        return values

    def _move(self, part: Part, to_device: bool) -> None:
        verb = "reload" if to_device else "offload"
        self._pass(verb)
        self.on_device[part] = to_device
        self._pass(verb)

    def _pass(self, verb: str, *, writes: bool = True) -> None:
        self.faults.pass_by("trainer", verb, writes=writes)

"""The Actor, over any backend: what scores rows, learns from them, and gives its weights away."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from rft.errors import RoleError
from rft.experience import Minibatch
from rft.models import ModelFolder
from rft.objectives import Objective, TokenScores
from rft.trainers import hugging_face
from rft.trainers.backend import Backend
from rft.trainers.learner import Learner
from rft.trainers.passes import Passes
from rft.trainers.protocol import Part, TensorSpec


class Actor:
    """See `Trainer`."""

    def __init__(self, backend: Backend, passes: Passes, folder: ModelFolder) -> None:
        self.name, self.managed = backend.name, backend.managed
        self._backend, self._passes, self._folder = backend, passes, folder
        self._learner = Learner(backend=backend, passes=passes, shown=_shown)

    # ---- weights ----

    def manifest(self) -> tuple[TensorSpec, ...]:
        """See `Trainer`."""
        named = self._backend.root.named().items()
        return tuple(TensorSpec(name=n, shape=tuple(self._backend.shape_of(t)), dtype=t.dtype) for n, t in named)

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Trainer`."""
        return self._backend.whole()

    def export(self, path: Path) -> None:
        """See `Trainer`."""
        hugging_face.export(path, self._backend.masters(), self._backend.root.model, self._folder, self._passes.world)

    def saved(self) -> dict[str, Tensor]:
        """See `Saved`."""
        return self._backend.saved()

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Saved`."""
        self._backend.install(tensors)

    # ---- computing ----

    def logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
    ) -> Float32[Tensor, "batch seq"]:
        """See `Trainer`."""
        self._require("model")
        return self._passes.first(self._backend, tokens, mask, wanted, temperature)

    def step(self, batch: Minibatch, old: Float32[Tensor, "batch seq"] | None, objective: Objective) -> dict[str, float]:
        """See `Trainer`."""
        self._require("model", "optimizer")
        return self._learner.step(batch, old, objective)

    # ---- placement ----

    def offload(self, part: Part) -> None:
        """See `Trainer`."""
        self._backend.shelves[part].put()

    def reload(self, part: Part) -> None:
        """See `Trainer`."""
        self._backend.shelves[part].take()

    def bytes(self, part: Part) -> int:
        """See `Trainer`."""
        return self._backend.shelves[part].bytes

    def close(self) -> None:
        """See `Trainer`."""
        self._backend.close()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _require(self, *parts: Part) -> None:
        for part in parts:
            if self._backend.shelves[part].away:
                raise RoleError(f"the trainer's {part} lies on the host; reload it first")


def _shown(logprobs: Tensor, entropy: Tensor) -> TokenScores:
    return TokenScores(logprobs=logprobs, entropy=entropy)

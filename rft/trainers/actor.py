"""The Actor, over any backend: what scores rows, learns from them, and gives its weights away."""

import dataclasses as dc
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from rft.experience import Minibatch
from rft.images import RowImages
from rft.models import ModelFolder
from rft.narrow import Narrows
from rft.objectives import Objective, TokenScores
from rft.trainers import hugging_face
from rft.trainers.backend import Backend
from rft.trainers.holder import Holder
from rft.trainers.inputs import Inputs
from rft.trainers.learner import Learner
from rft.trainers.passes import Passes
from rft.trainers.protocol import TensorSpec


class Actor(Holder):
    """See `Trainer` and, for its hidden states, `passes.Readable`."""

    def __init__(self, backend: Backend, passes: Passes, folder: ModelFolder) -> None:
        super().__init__(backend, passes, "the trainer")
        self.managed, self.dtype, self._backend, self._folder = backend.managed, passes.dtype, backend, folder
        self._manifests = dict[torch.dtype | None, tuple[TensorSpec, ...]]()
        self._learner = Learner(backend=backend, passes=passes, shown=_shown)

    # ---- weights ----

    def manifest(self, dtype: torch.dtype | None = None) -> tuple[TensorSpec, ...]:
        """See `Trainer`. Names, shapes and dtypes stay as they are, and are looked for once."""
        if dtype not in self._manifests:
            shape_of, comes_in = self._backend.shape_of, self._backend.comes_in
            named = self._backend.root.named().items()
            self._manifests[dtype] = tuple(TensorSpec(name=n, shape=tuple(shape_of(t)), dtype=comes_in(t, dtype)) for n, t in named)
        return self._manifests[dtype]

    def stream_weights(self, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()) -> Iterator[tuple[str, Tensor]]:
        """See `Trainer`."""
        return self._backend.whole(dtype=dtype, narrows=narrows)

    def export(self, path: Path) -> None:
        """See `Trainer`."""
        hugging_face.export(path, self._backend.masters(), self._backend.root.model, self._folder, self.passes.world)

    # ---- computing ----

    def logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        """See `Trainer`."""
        self.require("model")
        return self.passes.first(self._backend, tokens, mask, wanted, temperature, images)

    def step(self, batch: Minibatch, old: Float32[Tensor, "batch seq"] | None, objective: Objective) -> dict[str, float]:
        """See `Trainer`."""
        self.require("model", "optimizer")
        return self._learner.step(batch, old, objective)

    def hidden(self, asked: Inputs) -> Float[Tensor, "wanted width"]:
        """See `passes.Readable`."""
        self.require("model")
        self._backend.training(False)
        with torch.no_grad():
            (states,) = self._backend.forward(dc.replace(asked, targets=None))
        return states

    def after_passes(self) -> None:
        """See `passes.Readable`."""
        self._backend.after_passes()


def _shown(logprobs: Tensor, entropy: Tensor) -> TokenScores:
    return TokenScores(logprobs=logprobs, entropy=entropy)

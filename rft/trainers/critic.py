"""The Critic, over a backend of its own or over a head on what the Actor makes of a row: what values rows, and learns from returns."""

from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from rft.experience import Minibatch, take
from rft.objectives import ValueObjective
from rft.trainers.backend import Steps
from rft.trainers.holder import Holder
from rft.trainers.learner import Learner
from rft.trainers.passes import Passes


class ValueModel(Holder):
    """See `Critic`."""

    def __init__(self, backend: Steps, passes: Passes) -> None:
        super().__init__(backend, passes, "the Critic")
        self._learner = Learner(backend=backend, passes=passes, shown=_shown)

    def values(
        self, tokens: Int64[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], wanted: Bool[Tensor, "batch seq"]
    ) -> Float32[Tensor, "batch seq"]:
        """See `Critic`."""
        self.require("model")
        return self.passes.first(self._held, tokens, mask, wanted, temperature=1.0)

    def step(self, batch: Minibatch, objective: ValueObjective) -> dict[str, float]:
        """See `Critic`. Demonstrations have no returns, and are left out."""
        self.require("model", "optimizer")
        return self._learner.step(take(batch, (~batch.demonstrated).nonzero()[:, 0]), None, objective)


def _shown(values: Tensor) -> Tensor:
    return values

"""One optimizer step: micro-batches, an objective, and one update, the same over every backend and for Actor and Critic."""

import dataclasses as dc
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxtyping import Float32
from torch import Tensor

from rft.errors import BadInput, NonFiniteGradient, RuntimePoisoned, ShapeError
from rft.experience import Minibatch
from rft.objectives import LossTerms, MicroBatch, Totals, check_terms
from rft.ops.metrics import Metric, host, merged, read
from rft.trainers.backend import Steps
from rft.trainers.inputs import Inputs
from rft.trainers.microbatches import Agreed, cut, gather
from rft.trainers.passes import Passes

AnyObjective = Callable[[Any, MicroBatch, Totals], LossTerms]


@dc.dataclass(frozen=True, kw_only=True)
class Learner:
    """A backend that learns from rows. `shown` makes of the root's answers what an objective gets first."""

    backend: Steps
    passes: Passes
    shown: Callable[..., Any]

    def step(self, batch: Minibatch, old: Float32[Tensor, "batch seq"] | None, objective: AnyObjective) -> dict[str, float]:
        """One optimizer step over the global batch; see `Trainer.step`."""
        if old is not None and old.shape != batch.tokens.shape:
            raise ShapeError(f"old log-probs of shape {tuple(old.shape)} for a mini-batch of {tuple(batch.tokens.shape)}")
        agreed = self.passes.agree(batch.tokens, batch.mask, batch.sampled, batch.demonstrated, batch.images)
        totals = agreed.totals
        if totals.tokens + totals.demonstrated == 0:
            raise BadInput("no rank brought a sampled or demonstrated token to this step, so there is nothing to learn from")
        self.backend.training(True)
        try:
            with self.passes.attention():
                numbered = enumerate(self.passes.ahead(self._cuts(batch, old, agreed)), start=1)
                parts = [self._accumulate(*part, totals, objective, n == 1, n == len(agreed.batches)) for n, part in numbered]
            metrics = self._together(parts)
            if not math.isfinite(metrics["loss"]):
                raise NonFiniteGradient(f"the loss is {metrics['loss']} at step {self.backend.steps}; the optimizer was not touched")
            return {**metrics, **self.backend.update()}
        finally:
            self.backend.after_passes()
            self.backend.forget()

    def _cuts(self, batch: Minibatch, old: Tensor | None, agreed: Agreed) -> Iterator[tuple[Inputs, MicroBatch]]:
        for rows in agreed.batches:
            micro = cut(batch, old, rows)
            part, shown = micro.rows, agreed.shown(batch.images, rows)
            yield self.passes.laid_out(part.tokens, part.mask, part.sampled, part.temperature, shown), micro

    def _accumulate(
        self, asked: Inputs, micro: MicroBatch, totals: Totals, objective: AnyObjective, first: bool, last: bool
    ) -> dict[str, Tensor | Metric]:
        """Adds one micro-batch's gradient to the step's; returns its shares of the metrics and the loss."""
        self.backend.before_micro_batch(last=last)
        answers = self.passes.run(self.backend, asked, micro.rows.sampled)
        terms = self._asked(objective, self.shown(*answers), micro, totals, first)
        # Backends average over the ranks, and the objective has divided by the global batch already. A loss that does not look at the
        # answers (a filler's, say) has a gradient too, of 0: every rank runs every backward pass.
        self.backend.backward(terms.loss * self.passes.world.size + 0 * answers[0].sum())
        shares = {**terms.metrics, "loss": terms.loss}
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in shares.items()}

    def _asked(self, objective: AnyObjective, shown: Any, micro: MicroBatch, totals: Totals, first: bool) -> LossTerms:
        """The objective's answer. On the first micro-batch ranks agree on it, since nothing has been written yet and no rank waits."""
        terms, failure = None, None
        try:
            terms = check_terms(objective(shown, micro, totals))
            if first and not terms.loss.requires_grad and bool(micro.rows.sampled.any()):
                raise BadInput("its loss has no gradient; compute it from what the objective is given, without detach() or no_grad()")
        except Exception as error:  # noqa: BLE001 (it is raised again below, with what it means for the runtime)
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        if first and (all_told := [f"rank {rank}: {what}" for rank, what in enumerate(gather(self.passes.world, told)) if what]):
            raise BadInput(f"the objective failed, and nothing was changed; {'; '.join(all_told)}") from failure
        if terms is None:
            raise RuntimePoisoned(f"the objective failed in the middle of a step, after earlier micro-batches; {told}") from failure
        return terms

    def _together(self, parts: list[dict[str, Tensor | Metric]]) -> dict[str, float]:
        """The metrics of all micro-batches of all ranks."""
        return read(merged(gather(self.passes.world, host(merged(parts)))))

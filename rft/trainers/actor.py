"""What the trainers of the Actor have in common: plan, micro-batches, objective, metrics, and where the parts are.

A backend is a subclass. It says how a loss goes backward, how the optimizer steps, and where the weights of each name lie.
"""

import abc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float32, Int64
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rft import tree
from rft.errors import BadInput, RftError, RoleError, RuntimePoisoned, ShapeError
from rft.experience import Minibatch
from rft.models import ModelFolder
from rft.objectives import LossTerms, MicroBatch, Objective, TokenScores, Totals
from rft.ops.metrics import Metric, host, merged, read
from rft.ops.packing import unpack
from rft.parallel.batches import Batches
from rft.parallel.world import World
from rft.spec import Training
from rft.trainers import hugging_face
from rft.trainers.inputs import inputs
from rft.trainers.microbatches import Share, agree, cut, gather, share_of, some_rows, to_width
from rft.trainers.protocol import Part, TensorSpec
from rft.trainers.scorer import scorer
from rft.trainers.shelf import Shelf


class ActorTrainer(abc.ABC):
    """A model and its scorer on the host, and every verb that does not depend on how they are sharded.

    A subclass shards `_scorer` in its constructor, and sets `_shelves`; `_forward` may be another module around the scorer.
    """

    _shelves: Mapping[Part, Shelf]

    def __init__(self, spec: Training, folder: ModelFolder, world: World) -> None:
        self._folder, self._world = folder, world
        self._dtype, self._budget = spec.dtype, spec.micro_batch_tokens
        self._model: Any = hugging_face.load(folder, checkpointing=spec.gradient_checkpointing)
        self._scorer: Any = scorer(self._model)
        self._forward: Any = self._scorer

    # ---- what a backend does in its own way ----

    @abc.abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Adds a micro-batch's gradient to the step's. The loss is this rank's part of a sum over ranks."""

    @abc.abstractmethod
    def _update(self) -> dict[str, float]:
        """Clips, steps, and gives `grad_norm` and `lr`. Raises `NonFiniteGradient`, the weights untouched."""

    @abc.abstractmethod
    def _forget(self) -> None:
        """Lets go of whatever gradient there is, after a step and after one that failed."""

    @abc.abstractmethod
    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Trainer`."""

    @abc.abstractmethod
    def _before_micro_batch(self, *, last: bool) -> None:
        """Called before each micro-batch of a step."""

    @abc.abstractmethod
    def _after_passes(self) -> None:
        """Called when the passes of a step, or of log-probs, are over."""

    def _spec_of(self, name: str, tensor: Any) -> TensorSpec:
        return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)

    def _masters(self) -> Iterator[tuple[str, Tensor]]:
        """What is exported: the most exact weights there are."""
        return self.stream_weights()

    # ---- weights ----

    def manifest(self) -> tuple[TensorSpec, ...]:
        tensors = self._model.state_dict(keep_vars=True)
        return tuple(self._spec_of(n, tensors[n]) for n in hugging_face.checkpoint_names(self._model))

    def export(self, path: Path) -> None:
        dtype = self._folder.config.dtype or torch.float32
        weights = {n: t.to("cpu", dtype, copy=True) for n, t in self._masters() if self._world.rank == 0}
        problem: list[str | None] = [None]
        if self._world.rank == 0:
            try:
                hugging_face.write(path, weights, self._model, self._folder)
            except OSError as error:
                problem = [f"the model could not be written to {path}: {error}"]
        dist.broadcast_object_list(problem, group=self._world.host, group_src=0)
        if problem[0] is not None:
            raise BadInput(problem[0])

    # ---- computing ----

    def logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
    ) -> Float32[Tensor, "batch seq"]:
        self._require("model")
        plan, _ = self._agree(share_of(mask, wanted))
        result, heat = torch.zeros(tokens.shape), torch.full((len(tokens),), temperature)
        self._forward.eval()
        with torch.no_grad(), self._attention():
            for rows in plan:
                asked = some_rows(tokens, mask, wanted, heat, rows)
                result[list(rows)] = to_width(self._scores(*asked).logprobs.cpu(), result.shape[1])[: len(rows)]
        self._after_passes()
        return result

    def step(self, batch: Minibatch, old: Float32[Tensor, "batch seq"] | None, objective: Objective) -> dict[str, float]:
        self._require("model", "optimizer")
        if old is not None and old.shape != batch.tokens.shape:
            raise ShapeError(f"old log-probs of shape {tuple(old.shape)} for a mini-batch of {tuple(batch.tokens.shape)}")
        plan, totals = self._agree(share_of(batch.mask, batch.sampled, batch.demonstrated))
        if totals.tokens + totals.demonstrated == 0:
            raise BadInput("no rank brought a sampled or demonstrated token to this step, so there is nothing to learn from")
        self._forward.train()
        try:
            cuts = enumerate((cut(batch, old, rows) for rows in plan), start=1)
            with self._attention():
                parts = [self._accumulate(micro, totals, objective, last=number == len(plan)) for number, micro in cuts]
            self._after_passes()
            return {**self._together(parts), **self._update()}
        finally:
            self._forget()

    def _accumulate(self, micro: MicroBatch, totals: Totals, objective: Objective, *, last: bool) -> dict[str, Tensor | Metric]:
        """Adds one micro-batch's gradient to the step's; returns its shares of the metrics and the loss."""
        self._before_micro_batch(last=last)
        rows = micro.rows
        new = self._scores(rows.tokens, rows.mask, rows.sampled, rows.temperature)
        terms = _asked(objective, new, tree.tree_map(self._here, micro), totals)
        # A loss that does not look at the log-probs (a filler's, say) has a gradient too, of 0: every rank runs every backward pass.
        # Backends average over the ranks, and the objective has divided by the global batch already.
        self._backward(terms.loss * self._world.size + 0 * new.logprobs.sum())
        shares = {**terms.metrics, "loss": terms.loss}
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in shares.items()}

    def _scores(self, tokens: Tensor, mask: Tensor, wanted: Tensor, temperature: Tensor) -> TokenScores:
        """Of the wanted tokens of rows that lie on the host: `[batch, seq]` on the device, 0 elsewhere."""
        asked = tree.tree_map(self._here, inputs(tokens, mask, wanted, temperature, self._scorer.layout))
        logprobs, entropy = (unpack(values, self._here(wanted)) for values in self._forward(asked))
        return TokenScores(logprobs=logprobs, entropy=entropy)

    def _agree(self, own: Share) -> tuple[Batches, Totals]:
        width: int = self._model.config.get_text_config().hidden_size
        return agree(self._world, own, self._budget, width=width, layout=self._scorer.layout)

    def _together(self, parts: list[dict[str, Tensor | Metric]]) -> dict[str, float]:
        """The metrics of all micro-batches of all ranks."""
        return read(merged(gather(self._world, host(merged(parts)))))

    def _attention(self) -> AbstractContextManager[object]:
        """On a CPU in bf16, the plain attention: the fused one's backward pass is far off.

        (The gradient of a model of 135M differed from that in fp32 by half, and by a tenth with the plain one, which is not slower
        on short rows.) Gradient checkpointing computes the forward pass again in the backward pass, so that belongs inside too.
        """
        rough = self._world.device.type == "cpu" and self._dtype != "float32"
        return sdpa_kernel(SDPBackend.MATH) if rough else nullcontext()

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._world.device)

    # ---- placement ----

    def offload(self, part: Part) -> None:
        self._shelves[part].put()

    def reload(self, part: Part) -> None:
        self._shelves[part].take()

    def bytes(self, part: Part) -> int:
        return self._shelves[part].bytes

    def close(self) -> None:
        for shelf in self._shelves.values():
            shelf.close()
        self._model = self._scorer = self._forward = None
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _require(self, *parts: Part) -> None:
        for part in parts:
            if self._shelves[part].away:
                raise RoleError(f"the trainer's {part} lies on the host; reload it first")


def _asked(objective: Objective, new: TokenScores, micro: MicroBatch, totals: Totals) -> LossTerms:
    """The objective's answer. Its own refusals come too late to be taken for ours: earlier micro-batches have left gradients."""
    try:
        return objective(new, micro, totals)
    except RftError as error:
        raise RuntimePoisoned(f"the objective failed in the middle of a step: {type(error).__name__}: {error}") from error

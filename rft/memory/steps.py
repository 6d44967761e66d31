"""What a trainer's pass and its optimizer step add to weights and moments, at each moment that may be the fullest."""

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence

from rft.memory.activations import Activations, Pass, activations
from rft.memory.outline import Blueprint, Outline, outline
from rft.memory.sharding import FP32, itemsize, shards_of
from rft.ops.transfer import BATCH
from rft.spec import DeepSpeedTrainer, DType, FSDP2Trainer
from rft.spec.training import Training
from rft.trainers.gathering import most

LIVE = 1_000_000_000
"""Parameters that ZeRO 3 keeps gathered at most, by its own default (stage3_max_live_parameters)."""
REDUCED = 50_000_000
"""Elements that DeepSpeed reduces together, as our trainer tells it."""
CELL = 128
"""Bytes on the device for each token of a micro-batch beside the model: the experience of this one and of the next, which is on its way
(tokens, masks, log-probs of three kinds, advantages, values), and what an objective makes of them."""

Rows = Mapping[str, int]
"""Bytes by what they are for."""
Measure = Callable[[Blueprint, Pass], Activations]
"""`activations`, or `bounded`."""


@dc.dataclass(frozen=True, kw_only=True)
class Work:
    """What one rank computes in a phase."""

    tokens: int
    """Of all its rows, padding included where they are padded."""
    wanted: int
    """Those that are scored or trained on."""
    longest: int
    """The longest row, in tokens."""

    device: str = "cuda"
    """The kind of device."""
    measure: Measure = activations
    """How what a pass holds is found."""

    def micro_batch(self, budget: int, dtype: DType, *, checkpointing: bool = False) -> Pass:
        """The largest pass that a budget of tokens makes of it. A row longer than the budget has one to itself."""
        tokens = max(min(self.tokens, budget), self.longest)
        wanted = min(self.wanted, tokens)
        return Pass(tokens=tokens, wanted=wanted, longest=self.longest, dtype=dtype, checkpointing=checkpointing, device=self.device)

    def passes(self, budget: int) -> int:
        """At least so many."""
        return max(-(-self.tokens // max(budget, self.longest)), 1)


def streamed(sizes: Sequence[int], ranks: int) -> int:
    """Bytes that a stream of tensors of these sizes takes at most before they are in the engine: what waits for the next launch there,
    and one tensor or, where they are gathered, what is on its way."""
    coming, copies = (most(sizes), 2) if ranks > 1 else (max(sizes, default=0), 1)
    return min(copies * sum(sizes), BATCH + coming)


def scoring(of: Blueprint, trainer: Training, work: Work, ranks: int, *, read: Blueprint | None = None) -> Rows:
    """A pass without gradient of a trained model: old log-probs, or values. `read` is the same with another head, where that is asked."""
    one = work.micro_batch(trainer.micro_batch_tokens, trainer.dtype)
    gathered = _gathered(outline(of), trainer, ranks)
    return {"gathered weights": gathered, "activations": work.measure(read or of, one).scoring, "experience": CELL * one.tokens}


def asking(of: Blueprint, dtype: DType, budget: int, work: Work, shards: int) -> Rows:
    """A pass of a frozen model, each block of which is sharded again after use."""
    one, shape = work.micro_batch(budget, dtype), outline(of)
    gathered = itemsize(dtype) * (_blocks_at_once(shards) * shape.largest_block + shape.outside)
    return {"gathered weights": gathered, "activations": work.measure(of, one).scoring, "experience": CELL * one.tokens}


def training(of: Blueprint, trainer: Training, work: Work, ranks: int) -> list[Rows]:
    """An optimizer step: as its last backward pass begins, and as it ends.

    Where there are several micro-batches, the gradient of the earlier ones is there while the activations are. With FSDP2's `keep_gathered`
    it is whole and in fp32 on every rank; without, and under ZeRO 2 and 3, in shards.
    """
    one = work.micro_batch(trainer.micro_batch_tokens, trainer.dtype, checkpointing=trainer.gradient_checkpointing)
    lives, several = work.measure(of, one), work.passes(trainer.micro_batch_tokens) > 1
    rest = {"experience": CELL * one.tokens}
    if isinstance(trainer, DeepSpeedTrainer):
        return [{**_zero_step(outline(of), trainer, ranks), "activations": lives.training, **rest}]
    assert isinstance(trainer, FSDP2Trainer)
    begins, ends = _fsdp2_step(outline(of), trainer, lives, shards_of(trainer.shards, ranks), several=several)
    return [{**begins, **rest}, {**ends, **rest}]


def _gathered(shape: Outline, trainer: Training, ranks: int) -> int:
    """Parameters in full, in the dtype of computing, beside this rank's part."""
    own = itemsize(trainer.dtype)
    if isinstance(trainer, DeepSpeedTrainer):
        return own * min(shape.parameters, LIVE) if trainer.stage == 3 else 0
    assert isinstance(trainer, FSDP2Trainer)
    if trainer.keep_gathered:
        return own * shape.parameters
    return own * (_blocks_at_once(shards_of(trainer.shards, ranks)) * shape.largest_block + shape.outside)


def _blocks_at_once(shards: int) -> int:
    """The one that computes and, where there is somebody to gather from, the next one with the buffer that it arrives in."""
    return 1 if shards == 1 else 3


def _fsdp2_step(shape: Outline, trainer: FSDP2Trainer, lives: Activations, shards: int, *, several: bool) -> tuple[Rows, Rows]:
    trained = shape.trained
    whole, block, outside = (FP32 * n for n in (trained.parameters, trained.largest_block, trained.outside))
    reducing = block + block // shards
    earlier = (0 if not several else whole if trainer.keep_gathered else whole // shards) * (trainer.keep_gathered or not trainer.offload)
    begins = {
        "gathered weights": _gathered(shape, trainer, shards),
        "gradients": earlier + reducing,
        "activations": lives.training,
    }
    # What stands outside of the blocks is reduced last: its gradient as it was computed, then as it travels, then this rank's part.
    computed = outside if several and trainer.keep_gathered else 0
    travels = max(lives.outside + computed + outside, outside + outside // shards)
    settled = 0 if trainer.offload else (whole if several and not trainer.keep_gathered else whole - outside) // shards
    ends = {"gathered weights": itemsize(trainer.dtype) * shape.outside, "gradients": settled + travels}
    return begins, ends


def _zero_step(shape: Outline, trainer: DeepSpeedTrainer, ranks: int) -> Rows:
    """Not measured: two buckets on their way, and in stage 2 this rank's part twice, as it is laid out for the update."""
    bucket = 2 * FP32 * min(shape.parameters, REDUCED)
    part = 2 * FP32 * shape.parameters // ranks if trainer.stage == 2 and not trainer.offload_optimizer else 0
    return {"gathered weights": _gathered(shape, trainer, ranks), "gradients": part + bucket}

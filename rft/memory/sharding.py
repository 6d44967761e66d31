"""What each rank holds of a model's weights and moments, exactly: the bytes that `Trainer.bytes` tells."""

import dataclasses as dc
from collections.abc import Sequence

import torch

from rft.errors import BadInput
from rft.memory.outline import Outline
from rft.spec import DeepSpeedTrainer, DType, FSDP2Trainer
from rft.spec.training import Training

FP32 = 4
MOMENTS = 2
START = 2
"""DeepSpeed begins every rank's part of a flat buffer at a multiple of so many elements."""


@dc.dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of this rank: on the device when it is there, and on the host for good."""

    weights: int
    optimizer: int
    host: int = 0


def ours(trainer: object) -> Training:
    """The same, if it is one whose memory is known. Raises `BadInput`."""
    if isinstance(trainer, FSDP2Trainer | DeepSpeedTrainer):
        return trainer
    raise BadInput(f"memory can be planned for FSDP2Trainer and DeepSpeedTrainer, not for {type(trainer).__name__}")


def held(outline: Outline, trainer: Training, ranks: int, rank: int = 0) -> Held:
    """Of a trained model; of an adapted one the adapter has masters and moments, and all else the dtype of computing.

    Rank 0 holds as much as any other. Raises `BadInput` for shards that do not divide the ranks, and for an adapter under DeepSpeed.
    """
    if isinstance(trainer, FSDP2Trainer):
        shards = shards_of(trainer.shards, ranks)
        trained = outline.trained.shapes
        weights, optimizer = slices(trained, shards, FP32), MOMENTS * own_slices(trained, shards, rank, FP32)
        weights += slices(outline.shapes, shards, itemsize(trainer.dtype)) if outline.adapter else 0
        return Held(weights=0, optimizer=0, host=weights + optimizer) if trainer.offload else Held(weights=weights, optimizer=optimizer)
    assert isinstance(trainer, DeepSpeedTrainer)
    if outline.adapter:
        raise BadInput("the memory of an adapter (lora) under DeepSpeed cannot be planned; plan it with FSDP2, which takes about the same")
    return _zero(outline, trainer, ranks)


def shards_of(shards: int | None, ranks: int) -> int:
    """Ranks that hold one copy between them. Raises `BadInput` where they do not divide all ranks."""
    count = shards or ranks
    if ranks % count:
        raise BadInput(f"shards={count} does not divide the world size {ranks}")
    return count


def slices(shapes: Sequence[torch.Size], shards: int, itemsize: int) -> int:
    """FSDP2's slices along dimension 0, each padded to the length of the first rank's: the same on every rank."""
    return sum(-(-shape[0] // shards) * shape[1:].numel() for shape in shapes) * itemsize


def own_slices(shapes: Sequence[torch.Size], shards: int, rank: int, itemsize: int) -> int:
    """The same without padding, as `torch.chunk` cuts: the last ranks may have less, or nothing."""
    return sum(_rows(shape[0], shards, rank % shards) * shape[1:].numel() for shape in shapes) * itemsize


def frozen(outline: Outline, dtype: DType, shards: int | None, ranks: int) -> int:
    """Weights of a model that is only asked."""
    count, own = shards_of(shards, ranks), itemsize(dtype)
    return slices(outline.shapes, count, own) + slices(outline.exact, count, FP32 - own)


def itemsize(dtype: DType) -> int:
    """Bytes of a number."""
    return torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def _rows(rows: int, shards: int, rank: int) -> int:
    each = -(-rows // shards)
    return min(max(rows - rank * each, 0), each)


def _zero(outline: Outline, trainer: DeepSpeedTrainer, ranks: int) -> Held:
    """Flat buffers: weights in the dtype of computing beside fp32 masters, moments, and gradients that stay between steps."""
    own = itemsize(trainer.dtype)
    if trainer.stage == 3:
        part = sum(-(-shape.numel() // ranks) for shape in outline.shapes)
        weights, lasting = own * part, FP32 * part
    else:
        whole = -(-outline.parameters // (START * ranks)) * START * ranks
        part, weights = whole // ranks, own * whole
        lasting = FP32 * whole if trainer.stage == 1 and trainer.dtype == "bfloat16" else 0
    if trainer.offload_optimizer:
        return Held(weights=weights, optimizer=0, host=(2 + MOMENTS) * FP32 * part)  # its gradients lie there too
    return Held(weights=weights + FP32 * part, optimizer=MOMENTS * FP32 * part + lasting)

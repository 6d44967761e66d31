"""DeepSpeed's flat buffers, as its optimizers for ZeRO keep them: found by name, and moved by their storage.

Below stage 3 the trained weights stand one after the other in one flat buffer, and each rank has the masters of an equal part of it,
which cuts through a weight in the middle. In stage 3 each weight is cut into equal parts, and each rank has the masters of its parts.
"""

import dataclasses as dc
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rft.trainers.pieces import even_bounds
from rft.trainers.protocol import Part
from rft.trainers.shelf import key

MOMENTS = ("exp_avg", "exp_avg_sq")

MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition")
"""Of stages 1 and 2, of stage 3, and of stage 1 in bfloat16, which has an optimizer of its own."""
GRADIENTS = ("grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
"""What stays between steps: of stage 3, and of stage 1 in bfloat16."""


def masters(optimizer: Any) -> list[Any]:
    """This rank's fp32 partitions."""
    return next(list(getattr(optimizer, name)) for name in MASTERS if hasattr(optimizer, name))


def make_moments(optimizer: Any) -> None:
    """AdamW's moments there from the start, so that what it takes is known before the first step."""
    for master in masters(optimizer):
        step = torch.zeros((), dtype=torch.float32, device=master.device)
        moments = {name: torch.zeros_like(master, requires_grad=False) for name in MOMENTS}
        optimizer.optimizer.state[master] = {"step": step, **moments}


def parts(optimizer: Any, weights: list[Tensor], *, on_host: bool) -> dict[Part, list[Tensor]]:
    """What lies on the device, one tensor for each storage: weights with their masters, moments with gradients that stay."""
    own = masters(optimizer)
    moments = [optimizer.optimizer.state[m][name] for m in own for name in MOMENTS]
    if on_host:
        return {"model": _storages(weights), "optimizer": []}
    return {"model": _storages([*weights, *own]), "optimizer": _storages([*moments, *_lasting_gradients(optimizer)])}


def _lasting_gradients(optimizer: Any) -> list[Tensor]:
    found = [getattr(optimizer, name) for name in GRADIENTS if getattr(optimizer, name, None) is not None]
    return [tensor for each in found for tensor in (each if isinstance(each, list) else [each])]


@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """What this rank holds of one parameter. Stretches are of the parameter laid out flat."""

    shape: torch.Size
    bounds: tuple[tuple[int, int], ...]
    """Of each rank's stretch: its first number, and the one after its last."""
    weight: Tensor
    """What computes: below stage 3 the whole parameter, in stage 3 this rank's part, which padding makes as long as all others."""
    stretches: dict[str, Tensor]
    """This rank's stretch of `weight`, and in fp32 of `model`, the master, and the moments. What is not trained is its own master."""


def held(optimizer: Any, parameters: list[Any], *, rank: int, ranks: int) -> dict[int, Held]:
    """By the identity of the parameters."""
    everything = {id(p): _untrained(p, rank, ranks) for p in parameters}
    stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    return everything | dict(_in_stage_3(optimizer, everything) if stage_3 else _below_stage_3(optimizer, everything, rank, ranks))


def _below_stage_3(optimizer: Any, everything: dict[int, Held], rank: int, ranks: int) -> Iterator[tuple[int, Held]]:
    kind = "bf16" if hasattr(optimizer, "bf16_groups") else "bit16"
    groups, flats = getattr(optimizer, f"{kind}_groups"), getattr(optimizer, f"{kind}_groups_flat")
    for master, group, flat in zip(masters(optimizer), groups, flats, strict=True):
        for p in group:
            start, size = p.data.storage_offset() - flat.storage_offset(), len(master)
            ends = [min(max(r * size - start, 0), p.numel()) for r in range(ranks + 1)]
            first, end = ends[rank : rank + 2]
            own = slice(first + start - rank * size, end + start - rank * size) if first < end else slice(0)
            stretches = {"weight": p.data.view(-1)[first:end], **_trained(optimizer, master, own)}
            bounds = tuple(itertools.pairwise(ends))
            yield id(p), dc.replace(everything[id(p)], bounds=bounds, stretches=stretches)


def _in_stage_3(optimizer: Any, everything: dict[int, Held]) -> Iterator[tuple[int, Held]]:
    for p in (p for group in optimizer.fp16_groups for p in group):
        group, start, _ = optimizer.grad_position[optimizer.get_param_id(p)]
        rest = everything[id(p)]
        own = slice(start, start + len(rest.stretches["weight"]))
        yield id(p), dc.replace(rest, stretches=rest.stretches | _trained(optimizer, masters(optimizer)[group], own))


def _trained(optimizer: Any, master: Any, own: slice) -> dict[str, Tensor]:
    state = optimizer.optimizer.state[master]
    return {"model": master.detach()[own], **{name: state[name][own] for name in MOMENTS}}


def _untrained(p: Any, rank: int, ranks: int) -> Held:
    shape: torch.Size = getattr(p, "ds_shape", p.shape)
    bounds = even_bounds(shape.numel(), ranks)
    first, end = bounds[rank]
    weight: Tensor = p.ds_tensor.data if hasattr(p, "ds_tensor") else p.data
    stretch = weight[: end - first] if hasattr(p, "ds_tensor") else weight.view(-1)[first:end]
    return Held(shape=shape, bounds=bounds, weight=weight, stretches={"weight": stretch, "model": stretch})


def make_room(optimizer: Any) -> None:
    """Memory for what gradients go through in a step; see `release_room`."""
    for buffer in _room(optimizer):
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())


def release_room(optimizer: Any) -> None:
    """Gives it back after a step: DeepSpeed would keep a whole bucket for good."""
    if any(buffer.is_cuda for buffer in _room(optimizer)):
        torch.cuda.synchronize()  # a step that failed may still be sending
    for buffer in _room(optimizer):
        buffer.untyped_storage().resize_(0)


def _room(optimizer: Any) -> list[Tensor]:
    """In stage 3 the bucket that is reduced together; below it, with the optimizer on the host, a parameter's gradient on its way."""
    buckets = [bucket.buffer for bucket in optimizer.ipg_buckets.values()] if hasattr(optimizer, "ipg_buckets") else []
    return [b for b in (*buckets, getattr(optimizer, "temp_grad_buffer_for_gpu_offload", None)) if isinstance(b, Tensor)]


def set_steps(optimizer: Any, steps: int) -> None:
    """The number of steps that AdamW corrects its moments for."""
    for master in masters(optimizer):
        _ = optimizer.optimizer.state[master]["step"].fill_(steps)


def _storages(tensors: list[Tensor]) -> list[Tensor]:
    """One flat tensor for each storage, over all of it."""
    first = {key(tensor): tensor for tensor in reversed(tensors)}
    return [torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage()) for t in first.values()]


def forget_gradients(optimizer: Any) -> None:
    """Clears what a step has added up, as DeepSpeed does when it skips one. After a whole step too: what stays of it, in stage 3 and where
    the optimizer is on the host, would be the next one's gradient of a parameter that has none then, as a vision tower without images."""
    if hasattr(optimizer, "clear_hp_grads"):
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer._pre_step()
        optimizer._overflow_clean_up(1.0)
    else:
        _forget_below_stage_3(optimizer)
    for kept in (*_lasting_gradients(optimizer), *(master.grad for master in masters(optimizer))):
        if kept is not None:
            _ = kept.zero_()


def _forget_below_stage_3(optimizer: Any) -> None:
    optimizer.micro_step_id = -1
    optimizer._epilogue_ran_this_backward = False
    optimizer.zero_grad(set_to_none=True)
    optimizer._release_preflattened_grad_buffers()
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()
        return
    for kept in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        kept.update(dict.fromkeys(kept))

"""DeepSpeed's flat buffers, as its optimizers for ZeRO keep them: found by name, and moved by their storage."""

from typing import Any

import torch
from torch import Tensor

from rft.trainers.protocol import Part

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
        moments = {name: torch.zeros_like(master, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.optimizer.state[master] = {"step": step, **moments}


def parts(optimizer: Any, weights: list[Tensor], *, on_host: bool) -> dict[Part, list[Tensor]]:
    """What lies on the device, one tensor for each storage: weights with their masters, moments with gradients that stay."""
    own = masters(optimizer)
    moments = [optimizer.optimizer.state[m][name] for m in own for name in ("exp_avg", "exp_avg_sq")]
    model, rest = [*weights], [*_lasting_gradients(optimizer)]
    if not on_host:
        model, rest = [*model, *own], [*rest, *moments]
    return {"model": _storages(model), "optimizer": _storages(rest)}


def _lasting_gradients(optimizer: Any) -> list[Tensor]:
    found = [getattr(optimizer, name) for name in GRADIENTS if getattr(optimizer, name, None) is not None]
    return [tensor for each in found for tensor in (each if isinstance(each, list) else [each])]


def key(tensor: Tensor) -> int:
    """The same for all tensors of one storage, wherever it has been moved."""
    storage: Any = tensor.untyped_storage()
    address: int = storage._cdata
    return address


def _storages(tensors: list[Tensor]) -> list[Tensor]:
    """One flat tensor for each storage, over all of it."""
    first = {key(tensor): tensor for tensor in reversed(tensors)}
    return [torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage()) for t in first.values()]


def forget_gradients(optimizer: Any) -> None:
    """Clears what a step that failed has added up, as DeepSpeed does when it skips one. Harmless after a whole step."""
    if hasattr(optimizer, "clear_hp_grads"):
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer._pre_step()
        optimizer._overflow_clean_up(1.0)
    else:
        _forget_below_stage_3(optimizer)


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

"""A model that rank 0 alone reads: the others begin with parameters without memory, and are sent what they hold."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rft.errors import BadInput
from rft.parallel.batches import Layout
from rft.parallel.world import World
from rft.trainers.backend import Root

R = TypeVar("R", bound=Root)


def on_rank_0(world: World, whole: Callable[[], R], like: Callable[[Layout], R]) -> R:
    """The root as rank 0 makes it; on the others `like`, in the same layout, without memory for weights. Collective.

    What goes wrong on rank 0 is raised on all, as `BadInput`.
    """
    made, failure = None, None
    if world.rank == 0:
        try:
            made = whole()
        except Exception as error:  # noqa: BLE001 (it is raised again below, on all ranks: the others wait for this one)
            failure = error
    what = None if failure is None else str(failure) if isinstance(failure, BadInput) else f"{type(failure).__name__}: {failure}"
    told: list[tuple[str | None, Layout]] = [(what, made.layout if made else "padded")]
    if world.size > 1:
        dist.broadcast_object_list(told, src=0, group=world.host)
    problem, layout = told[0]
    if problem is not None:
        raise BadInput(problem) from failure
    return made or like(layout)


def read(root: Root, world: World) -> dict[str, Tensor]:
    """What rank 0 has read and is to send; nothing elsewhere. Before a backend takes the root: it leaves these where they lie."""
    return {name: tensor.detach() for name, tensor in root.named().items()} if world.rank == 0 else {}


def sent(root: Root, whole: Mapping[str, Tensor], world: World, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What rank 0 has `read`, one tensor at a time: its name, what it is here, and all of it. Collective: exhaust it on every rank.

    Parameters are sent as `dtype` (None: as they are here).
    """
    for name, tensor in root.named().items():
        kind = dtype if dtype is not None and isinstance(tensor, nn.Parameter) else tensor.dtype
        shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
        full = whole[name].to(world.device, kind) if whole else torch.empty(shape, dtype=kind, device=world.device)
        _ = dist.broadcast(full, src=0)
        yield name, tensor, full

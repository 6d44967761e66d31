"""A reduce-scatter for gloo, whose own sends the whole input in an all-reduce and keeps one slice (four times as slow on two ranks)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rft.errors import RftError


class GlooReduceScatter:
    """Every rank sends each other rank its slice and adds up what it gets, in the order of ranks: the same bits every time.

    What `FSDPModule.set_custom_reduce_scatter` takes.
    """

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False) -> None:
        """output = Σ over ranks of this rank's slice of input, divided by their number if `op` is AVG. Blocks."""
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise RftError(f"gloo's reduce-scatter sums or averages, and blocks; asked for {op}, async_op={async_op}")
        rank, size = group.rank(), group.size()
        slices = list(input_tensor.chunk(size))
        received = [slices[rank] if peer == rank else torch.empty_like(output_tensor) for peer in range(size)]
        pending = [
            dist.P2POp(call, tensors[peer], group=group, group_peer=peer)
            for peer in range(size)
            if peer != rank
            for call, tensors in ((dist.isend, slices), (dist.irecv, received))
        ]
        for work in dist.batch_isend_irecv(pending):
            _ = work.wait()
        _ = torch.sum(torch.stack(received), dim=0, out=output_tensor) if size > 2 else torch.add(*received, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            _ = output_tensor.div_(size)

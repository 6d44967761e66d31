"""Small values of all ranks, by pickle, in one collective where the common way takes two: a step has several of them."""

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
LENGTH, HEAD = 8, 504
"""Bytes that tell how long a message is, and those of it that travel beside; what is longer takes a second collective."""

# The same collective by the name that newer PyTorch gives it, or the one that it deprecates.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009


def gathered(value: T, group: dist.ProcessGroup | None, ranks: int) -> list[T]:
    """The values of all ranks of a group on the host, in their order. Collective."""
    if ranks == 1:
        return [value]
    said = pickle.dumps(value)
    heads = _together(len(said).to_bytes(LENGTH, "little") + said[:HEAD], LENGTH + HEAD, group, ranks)
    lengths = [int.from_bytes(head[:LENGTH], "little") for head in heads]
    rest = max(lengths) - HEAD
    tails = _together(said[HEAD:], rest, group, ranks) if rest > 0 else [b""] * ranks
    messages = zip(heads, tails, lengths, strict=True)
    return [pickle.loads((head[LENGTH:] + tail)[:length]) for head, tail, length in messages]


def _together(own: bytes, size: int, group: dist.ProcessGroup | None, ranks: int) -> list[bytes]:
    """What every rank has, filled up to as many bytes."""
    everywhere: Tensor = torch.empty(ranks * size, dtype=torch.uint8)
    _ = all_gather(everywhere, torch.frombuffer(bytearray(own.ljust(size, b"\0")), dtype=torch.uint8), group=group)
    data = everywhere.numpy().tobytes()
    return [data[first : first + size] for first in range(0, len(data), size)]

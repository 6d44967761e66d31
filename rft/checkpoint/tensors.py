"""Named tensors in shards, by `torch.distributed.checkpoint`, as safetensors: no pickle is written or read.

Each rank writes its own part of what is cut over the ranks, and one rank what all of them hold alike. They are read at any number of ranks.
"""

import contextlib
import itertools
import warnings
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from rft.errors import CheckpointFailed

FOLDER = "tensors"
FILE_BYTES = 1 << 30
"""A file is put together in memory, and has at most about so many bytes of a rank's part."""
SHOWN = 8


class Fact(TypedDict):
    """What is known of a tensor."""

    shape: list[int]
    dtype: str


def facts_of(tensors: Mapping[str, Tensor]) -> dict[str, Fact]:
    """Whole shape and dtype of each tensor."""
    return {name: Fact(shape=list(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}


def differences(saved: Mapping[str, Fact], here: Mapping[str, Fact]) -> list[str]:
    """What stands in the way of reading tensors of `saved` into those that are here, by name; nothing if they agree."""
    missing = [f"{name} is not in the checkpoint" for name in sorted(here.keys() - saved.keys())]
    surplus = [f"{name} of the checkpoint is not here" for name in sorted(saved.keys() - here.keys())]
    both = [(name, saved[name], here[name]) for name in sorted(saved.keys() & here.keys())]
    wrong = [f"{name} is {_shown(a)} in the checkpoint, and {_shown(b)} here" for name, a, b in both if a != b]
    return [*wrong, *missing, *surplus]


def some(problems: Iterable[str]) -> str:
    """A list of problems that fits into a message."""
    problems = list(problems)
    rest = len(problems) - SHOWN
    return "; ".join([*problems[:SHOWN], *([f"and {rest} more"] if rest > 0 else [])])


def write(checkpoint: Path, tensors: Mapping[str, Tensor], ranks: int, group: Any) -> None:
    """Writes all tensors, each rank its own files, and waits until they are on the disk. Collective.

    `group` is a gloo group of all ranks; None: there is only this one. Raises `CheckpointFailed` on all ranks.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(checkpoint / FOLDER), fqn_to_index_mapping=file_numbers(tensors, ranks), save_distributed=True)
    try:
        with _alone_or(group):
            _ = save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointFailed(f"tensors could not be written to {checkpoint}: {_reasons(error)}") from error


def read(checkpoint: Path, tensors: Mapping[str, Tensor], group: Any) -> None:
    """Fills `tensors` in place with what was written under their names. Collective. Raises as `write` does."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(checkpoint / FOLDER))
    try:
        with _alone_or(group):
            load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointFailed(f"tensors could not be read from {checkpoint}: {_reasons(error)}") from error


def file_numbers(tensors: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """Which of a rank's files each tensor goes to, from 1 on; the same on all ranks."""
    ends = itertools.accumulate(torch.Size(t.shape).numel() * t.element_size() for t in tensors.values())
    numbers = [max(end - 1, 0) // (FILE_BYTES * ranks) for end in ends]
    used = {number: place for place, number in enumerate(sorted(set(numbers)), start=1)}
    return {name: used[number] for name, number in zip(tensors, numbers, strict=True)}


def own_files(checkpoint: Path, rank: int) -> list[str]:
    """Names of the files that a rank has written, below the checkpoint's folder."""
    return [f"{FOLDER}/{path.name}" for path in (checkpoint / FOLDER).glob(f"shard-{rank + 1:05}-*")]


@contextlib.contextmanager
def _alone_or(group: Any) -> Generator[None]:
    """Without a group it is meant that there is one process, which PyTorch warns of."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _shown(fact: Fact) -> str:
    return f"{tuple(fact['shape'])} {fact['dtype']}"


def _reasons(error: Any) -> str:
    return "; ".join(f"rank {rank}: {type(why).__name__}: {why}" for rank, (why, _) in sorted(error.failures.items()))

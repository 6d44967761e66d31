"""What a whole set of weights is: the names that a checkpoint of the model has, and a stream checked against them.

Tied heads are two names for one tensor. A set has each tensor once, under whichever of its names the sender takes.
"""

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rft.errors import SyncFailed
from rft.models import auto_class, kind_of, stored_names
from rft.narrow import UNCUT, Narrows, shape_in

Names = tuple[str, ...]
"""All names of one tensor; the first stands for it."""


def named(module: Any) -> dict[Names, Tensor]:
    """Every tensor that a checkpoint of a Hugging Face model has: parameters and persistent buffers.

    Buffers that no checkpoint has (rotary frequencies) are none of them: nobody sends those, so they must never be released.
    """
    names, tensors, stored = dict[int, list[str]](), dict[int, Tensor](), stored_names(module)
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(stored[name])
        tensors[id(tensor)] = tensor
    return {tuple(names[key]): tensors[key] for key in names}


def shapes_of(config: Any) -> dict[Names, torch.Size]:
    """The shapes of such a set, for a causal LM of this configuration, with images or without; nothing of its size is allocated."""
    with torch.device("meta"):
        module = auto_class(kind_of(config)).from_config(config)
    return {names: tensor.shape for names, tensor in named(module).items()}


def common_dtype(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """That of all floating-point tensors, if they have the same."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


@contextlib.contextmanager
def delivery(
    tensors: Iterator[tuple[str, Tensor]], shapes: Mapping[Names, torch.Size], engine: str, narrows: Narrows = UNCUT
) -> Generator[Iterator[tuple[str, Tensor]]]:
    """The tensors of a stream that belong to the set, under the names that they came with; of each what `narrows` takes of it, whether
    that comes or all of it.

    On leaving, the stream is exhausted in any case, since other ranks take part in it. Raises `SyncFailed` then that names what is
    unknown, of a wrong shape, or has not come.
    """
    first = {name: names[0] for names in shapes for name in names}
    missing = {names[0]: shape for names, shape in shapes.items()}
    problems = list[str]()

    def fitting() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            expected = missing.pop(first.get(name, ""), None)
            if expected is None:
                problems.append(f"{name} {'came twice' if name in first else 'is not known'}")
            elif tensor.shape == shape_in(narrows, name, expected):
                yield name, tensor
            elif tensor.shape == expected:
                yield name, narrows[name].of(tensor)
            else:
                problems.append(f"{name} has shape {tuple(tensor.shape)} instead of {tuple(expected)}")
            del tensor  # the reader may have let go of it, and the next one needs memory

    try:
        yield fitting()
    finally:
        for _ in tensors:
            pass
    problems += [f"{name} did not come" for name in missing]
    if problems:
        raise SyncFailed(f"the {engine} engine did not get the weights of its model: {_some(problems)}")


def _some(problems: Sequence[str], shown: int = 8) -> str:
    return "; ".join(problems[:shown]) + (f"; and {len(problems) - shown} more" if len(problems) > shown else "")

"""A question with a checkable answer: what every data set is made of."""

import dataclasses as dc
import hashlib
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from rft.errors import BadInput
from rft.shapes import check_fields

Last = Literal["keep", "drop"]
"""What becomes of the last, partial batch of an epoch: `keep` gives it, smaller; `drop` skips it and goes on to the next epoch."""


@dc.dataclass(frozen=True, kw_only=True)
class Question:
    """One question. `id` is its stable number in the data set: sampling seeds and groups come from it."""

    id: int
    text: str
    answer: str
    images: tuple[str, ...] = ()
    """Files of the images that stand before the text, in this order."""

    def __post_init__(self) -> None:
        check_fields(self)


def check_questions(questions: Sequence[Question], source: str) -> None:
    """Raises `BadInput` that names `source` where there is no question at all, or where two have the same id."""
    if not questions:
        raise BadInput(f"{source} has no questions; a data set needs at least one")
    if len({q.id for q in questions}) < len(questions):
        raise BadInput(f"{source} has two questions of the same id; sampling seeds and groups come from ids, so they must differ")


def check_last(last: Last) -> None:
    """Raises `BadInput` for anything but `keep` and `drop`."""
    if last not in ("keep", "drop"):
        raise BadInput(f"last must be 'keep' or 'drop', got {last!r}")


def shuffled(count: int, *key: int | str) -> Int64[Tensor, "count"]:
    """A permutation of `range(count)` that depends on nothing but `count` and `key`."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(count, generator=generator)

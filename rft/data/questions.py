"""A question with a checkable answer: what every data set is made of."""

import dataclasses as dc
import hashlib
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Int64
from torch import Tensor

from rft.errors import BadInput
from rft.sampling import is_text
from rft.shapes import check_fields

Last = Literal["keep", "drop"]
"""What becomes of the last, partial batch of an epoch: `keep` gives it, smaller; `drop` skips it and goes on to the next epoch."""


@dc.dataclass(frozen=True, kw_only=True)
class Question:
    """One question. `id` is its stable number in the data set, of 64 bits: sampling seeds and groups come from it."""

    id: int
    text: str
    answer: str
    images: tuple[str, ...] = ()
    """Files of the images that stand before the text, in this order."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not -(2**63) <= self.id < 2**63:
            raise BadInput(f"Question.id must fit in 64 bits, got {self.id}; number the questions from 0")
        if not is_text(self.text):
            raise BadInput(f"question {self.id}: its text has half of a surrogate pair, which no model reads; mend it: {self.text!r:.120}")


def check_questions(questions: Sequence[Question], source: str) -> None:
    """Raises `BadInput` that names `source` for what are no questions, for none at all, and where two have the same id."""
    given: Any = questions
    if not isinstance(given, Sequence) or not all(isinstance(each, Question) for each in cast(Sequence[object], given)):
        raise BadInput(f"{source} must be a sequence of Question(id=…, text=…, answer=…), got {given!r:.120}")
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

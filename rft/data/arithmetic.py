"""Generated sums, "What is A + B?": a task with a verifiable answer that a small model can learn in minutes."""

import dataclasses as dc
import itertools

from rft.data.questions import Question, shuffled
from rft.errors import BadInput


@dc.dataclass(frozen=True, kw_only=True)
class Split:
    """Questions to train on, and others to measure with; no sum is in both, not even as B + A."""

    train: tuple[Question, ...]
    held_out: tuple[Question, ...]


def sums(*, largest: int = 50, held_out: int = 128, seed: int = 0) -> Split:
    """Every "What is A + B?" with 1 ≤ A, B ≤ `largest`, split by `seed`.

    A pair and its mirror image, A + B and B + A, stand on the same side, so that a held-out sum has never been trained on; of such
    a pair only one is measured. An id is (A − 1) · largest + (B − 1), whatever the split. Raises `BadInput` where the counts leave
    either side empty.
    """
    pairs = list(itertools.combinations_with_replacement(range(1, largest + 1), 2))
    if largest < 1 or not 1 <= held_out < len(pairs):
        raise BadInput(
            f"sums needs largest of at least 2 and held_out from 1 to below the {len(pairs)} different sums, got "
            f"largest={largest}, held_out={held_out}"
        )
    order = [pairs[i] for i in shuffled(len(pairs), "sums", seed).tolist()]
    measured = tuple(_question(a, b, largest) for a, b in map(_turned, order[:held_out]))
    mirrored = sorted({pair for a, b in order[held_out:] for pair in ((a, b), (b, a))})
    return Split(train=tuple(_question(a, b, largest) for a, b in mirrored), held_out=measured)


def _turned(pair: tuple[int, int]) -> tuple[int, int]:
    """Every other pair the other way round: held-out sums shall not all have the smaller number first."""
    a, b = pair
    return (b, a) if (a + b) % 2 else (a, b)


def _question(a: int, b: int, largest: int) -> Question:
    return Question(id=(a - 1) * largest + b - 1, text=f"What is {a} + {b}?", answer=str(a + b))

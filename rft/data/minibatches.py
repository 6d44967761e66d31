"""An experience cut into mini-batches, epoch by epoch, by an explicit cursor."""

import dataclasses as dc
from collections.abc import Iterator
from typing import ClassVar

from rft.data.questions import Last, check_last, shuffled
from rft.errors import BadInput
from rft.experience import Experience, Minibatch, take
from rft.shapes import check_fields, require_kind


@dc.dataclass(frozen=True, kw_only=True)
class Cut:
    """How an experience is cut. Each mini-batch is one optimizer step, which all ranks take together.

    So the same cut must give the same number of mini-batches on every rank: bring the same number of rows to each (`next_prompts`
    with `drop` does), or leave `size` at None.
    """

    size: int | None = None
    """Rows of a mini-batch, on each rank; None: all of them, which is one mini-batch whatever the number of rows."""
    epochs: int = 1
    """How often every row is trained on."""
    last: Last = "keep"
    """What becomes of the last, partial mini-batch of an epoch."""
    seed: int = 0
    """Of the order of the rows, which is another one in every epoch."""

    made_by: ClassVar[str] = "write Cut(size=…)"

    def __post_init__(self) -> None:
        check_fields(self, but=("last",))
        check_last(self.last)
        if self.epochs < 1 or (self.size is not None and self.size < 1):
            raise BadInput(f"Cut.size and epochs must be at least 1, got {self.size} and {self.epochs}")


@dc.dataclass(frozen=True, kw_only=True)
class MinibatchCursor:
    """The place in a cut experience: `position` rows of the shuffled epoch `epoch` have been given."""

    epoch: int = 0
    position: int = 0


def minibatches_per_epoch(rows: int, cut: Cut) -> int:
    """How many mini-batches an epoch over `rows` rows has. Raises `BadInput` for none: other ranks may wait for this one."""
    require_kind("minibatches(source, cut)", "cut", cut, Cut)
    if cut.size is None:
        return 1
    count = rows // cut.size if cut.last == "drop" else -(-rows // cut.size)
    if not count:
        raise BadInput(
            f"{rows} rows give no mini-batch of size={cut.size} with last={cut.last!r}; a rank that takes fewer optimizer "
            "steps than the others stops them all: make size smaller, or leave it at None"
        )
    return count


def next_minibatch(source: Experience, cut: Cut, cursor: MinibatchCursor) -> tuple[Minibatch, MinibatchCursor] | None:
    """The mini-batch at the cursor, and the cursor after it; None after the last epoch. Raises like `minibatches_per_epoch`."""
    size = len(source) if cut.size is None else cut.size
    if cursor.position >= minibatches_per_epoch(len(source), cut) * max(size, 1):
        cursor = MinibatchCursor(epoch=cursor.epoch + 1)
    if cursor.epoch >= cut.epochs:
        return None
    rows = shuffled(len(source), "minibatches", cut.seed, cursor.epoch)[cursor.position : cursor.position + size]
    return take(source, rows), dc.replace(cursor, position=cursor.position + max(size, 1))


def minibatches(source: Experience, cut: Cut) -> Iterator[Minibatch]:
    """All mini-batches of all epochs, in order. Raises `BadInput` at once where an epoch would have none."""
    require_kind("minibatches(source, cut)", "source", source, Experience)
    _ = minibatches_per_epoch(len(source), cut)  # refuses now, not at the first `next`
    return _walk(source, cut)


def _walk(source: Experience, cut: Cut) -> Iterator[Minibatch]:
    found = next_minibatch(source, cut, MinibatchCursor())
    while found is not None:
        minibatch, cursor = found
        yield minibatch
        found = next_minibatch(source, cut, cursor)

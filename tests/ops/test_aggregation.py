from functools import partial

import pytest
import torch
from torch import Tensor

from rft.errors import BadInput, ShapeError
from rft.ops import aggregation
from rft.ops.aggregation import Aggregation, Totals
from tests.ops.cases import gradient, random_tokens, seeds

NAN = float("nan")
ALL: dict[str, Aggregation] = {
    "token_mean": aggregation.token_mean,
    "sequence_mean_of_token_means": aggregation.sequence_mean_of_token_means,
    "sequence_mean_of_token_sums": aggregation.sequence_mean_of_token_sums,
    "constant_length": partial(aggregation.constant_length, length=16),
}


def totals_of(mask: Tensor) -> Totals:
    return Totals(tokens=int(mask.sum()), sequences=int(mask.any(1).sum()))


def test_by_hand() -> None:
    # Two sequences with marked tokens of losses 1, 2, 3 and 4; a third row has none.
    loss, mask = torch.tensor([[1.0, 2.0, 3.0], [NAN, 4.0, NAN], [NAN] * 3]), torch.tensor([[True] * 3, [False, True, False], [False] * 3])
    totals = totals_of(mask)
    assert totals == Totals(tokens=4, sequences=2)
    expected = {
        "token_mean": 10 / 4,
        "sequence_mean_of_token_means": (2 + 4) / 2,
        "sequence_mean_of_token_sums": (6 + 4) / 2,
        "constant_length": (6 + 4) / 2 / 16,
    }
    for name, aggregate in ALL.items():
        assert aggregate(loss, mask, totals).item() == pytest.approx(expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("seed", seeds(4))
def test_against_a_loop(seed: int, name: str, dtype: torch.dtype) -> None:
    loss, _, _, mask = random_tokens(seed, dtype)
    got = ALL[name](loss, mask, totals_of(mask))
    rows = [[x for x, marked in zip(*pair, strict=True) if marked] for pair in zip(loss.tolist(), mask.tolist(), strict=True)]
    rows = [row for row in rows if row]
    tokens, sequences = max(sum(map(len, rows)), 1), max(len(rows), 1)
    expected = {
        "token_mean": sum(map(sum, rows)) / tokens,
        "sequence_mean_of_token_means": sum(sum(row) / len(row) for row in rows) / sequences,
        "sequence_mean_of_token_sums": sum(map(sum, rows)) / sequences,
        "constant_length": sum(map(sum, rows)) / sequences / 16,
    }
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(expected[name], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("seed", seeds(6))
def test_any_split_adds_up_to_the_whole(seed: int, name: str) -> None:
    """Rows dealt to parts at random, some parts empty, each cut to its longest row: the same loss and gradient."""
    source, _, _, mask = random_tokens(seed, torch.float32)
    draw = torch.Generator().manual_seed(seed)
    leaf, totals, part = source.clone().requires_grad_(), totals_of(mask), torch.randint(0, 4, (len(mask),), generator=draw)
    whole = ALL[name](leaf, mask, totals)
    pieces = list[Tensor]()
    for index in range(4):
        rows = (part == index).nonzero().flatten()
        marks = mask[rows]
        width = max([int(columns.max()) + 1 for columns in (row.nonzero() for row in marks) if len(columns)], default=1)
        pieces.append(ALL[name](leaf[rows, :width], marks[:, :width], totals))
    total = torch.stack(pieces).sum()
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient(total, leaf), gradient(whole, leaf), rtol=1e-5, atol=1e-7)
    assert gradient(whole, leaf).isfinite().all()


@pytest.mark.parametrize("name", list(ALL))
def test_nothing_marked_is_zero(name: str) -> None:
    loss = torch.full((2, 3), NAN, requires_grad=True)
    value = ALL[name](loss, torch.zeros(2, 3, dtype=torch.bool), Totals(tokens=0, sequences=0))
    assert value.item() == 0.0
    assert (gradient(value, loss) == 0).all()
    assert ALL[name](torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool), Totals(tokens=5, sequences=2)).item() == 0.0


@pytest.mark.parametrize("length", [0, -4.0, NAN])
def test_a_bad_length_is_refused(length: float) -> None:
    with pytest.raises(BadInput, match=r"constant_length: length is .* above 0"):
        aggregation.constant_length(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool), Totals(tokens=1, sequences=1), length=length)


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="token_mean"):
        aggregation.token_mean(torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bool), Totals(tokens=1, sequences=1))

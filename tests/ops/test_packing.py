import pytest
import torch
from torch import Tensor

from rft.errors import ShapeError
from rft.ops.packing import Segments, one_behind_the_other, pack, segments, side_by_side, unpack

HAND = torch.tensor([[True, True, False], [False, False, False], [True, False, False], [True, True, True]])
"""Rows of 2, 0, 1 and 3 tokens."""


def random_mask(seed: int, *, holes: bool) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    rows, width = (int(torch.randint(1, 7, (), generator=draw)) for _ in range(2))
    if holes:
        return torch.rand(rows, width, generator=draw) < 0.5
    return torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=draw)


def naive(mask: Tensor) -> list[tuple[int, int, int]]:
    """(row, column, position) of each token."""
    found: list[tuple[int, int, int]] = []
    for row, marks in enumerate(mask.tolist()):
        columns = [column for column, marked in enumerate(marks) if marked]
        found += [(row, column, position) for position, column in enumerate(columns)]
    return found


def test_by_hand() -> None:
    where = segments(HAND)
    assert where.rows.tolist() == [0, 0, 2, 3, 3, 3]
    assert where.positions.tolist() == [0, 1, 0, 0, 1, 2]
    assert where.bounds.tolist() == [0, 2, 2, 3, 6]
    assert where.longest == 3
    values = torch.arange(12.0).view(4, 3)
    assert pack(values, HAND).tolist() == [0, 1, 6, 9, 10, 11]
    assert unpack(pack(values, HAND), HAND).tolist() == [[0, 1, 0], [0, 0, 0], [6, 0, 0], [9, 10, 11]]


def test_side_by_side_by_hand() -> None:
    where = segments(torch.tensor([[True, False, True], [True, False, False]]))  # a hole closes
    table = side_by_side(torch.tensor([[1, 10], [2, 20], [3, 30]]), where)
    assert table.tolist() == [[[1, 10], [2, 20]], [[3, 30], [0, 0]]]
    assert one_behind_the_other(table, where).tolist() == [[1, 10], [2, 20], [3, 30]]


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_against_a_loop(dtype: torch.dtype, seed: int, holes: bool) -> None:
    mask = random_mask(seed, holes=holes)
    tokens, values = naive(mask), (100 * torch.rand(mask.shape)).to(dtype)
    where, packed = segments(mask), pack(values, mask)
    assert [(row, position) for row, _, position in tokens] == list(zip(where.rows.tolist(), where.positions.tolist(), strict=True))
    assert where.bounds.diff().tolist() == mask.sum(dim=1).tolist()
    assert packed.dtype == dtype
    assert packed.tolist() == [values[row, column] for row, column, _ in tokens]
    assert torch.equal(unpack(packed, mask), torch.where(mask, values, torch.zeros((), dtype=dtype)))
    table = side_by_side(packed, where)
    assert table.shape == (len(mask), mask.sum(dim=1).max())
    assert [table[row, position] for row, _, position in tokens] == packed.tolist()
    assert torch.equal(one_behind_the_other(table, where), packed)


def test_nothing_at_all() -> None:
    for mask in (torch.zeros(0, 3, dtype=torch.bool), torch.zeros(2, 0, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)):
        where, packed = segments(mask), pack(torch.ones(mask.shape), mask)
        assert where.bounds.tolist() == [0] * (len(mask) + 1)
        assert where.longest == 0
        assert packed.shape == (0,)
        assert torch.equal(unpack(packed, mask), torch.zeros(mask.shape))


def test_rubbish_on_padding_touches_neither_value_nor_gradient() -> None:
    rubbish = torch.tensor([[1.0, torch.nan, torch.inf], [2.0, 3.0, -torch.inf]], requires_grad=True)
    mask = torch.tensor([[True, False, False], [True, True, False]])
    packed = pack(rubbish, mask)
    assert packed.tolist() == [1, 2, 3]
    (packed.square().sum()).backward()
    assert rubbish.grad is not None
    assert rubbish.grad.tolist() == [[2, 0, 0], [4, 6, 0]]


def test_gradients_go_back_to_where_the_values_came_from() -> None:
    weights = torch.arange(12.0).view(4, 3)
    packed = torch.ones(6, requires_grad=True)
    (weights * unpack(packed, HAND)).sum().backward()
    assert packed.grad is not None
    assert packed.grad.tolist() == [0, 1, 6, 9, 10, 11]
    table = torch.zeros(4, 3, 2, requires_grad=True)
    one_behind_the_other(table, segments(HAND)).sum().backward()
    assert table.grad is not None
    assert table.grad[..., 0].tolist() == HAND.float().tolist()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="pack"):
        pack(torch.zeros(2, 3), HAND)
    with pytest.raises(ShapeError, match=r"Segments\.positions"):
        Segments(
            rows=torch.zeros(2, dtype=torch.int64), positions=torch.zeros(3, dtype=torch.int64), bounds=torch.zeros(2).int(), longest=2
        )

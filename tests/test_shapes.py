import dataclasses as dc

import pytest
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from rft.errors import ShapeError
from rft.shapes import check_record, checked


@dc.dataclass(frozen=True)
class Table:
    """Two fields that share an axis, and one that is no tensor."""

    values: Float32[Tensor, "row column"]
    chosen: Bool[Tensor, "row"]
    name: str = "table"

    def __post_init__(self) -> None:
        check_record(self)


@checked
def scaled(values: Float32[Tensor, "row column"], factors: Float32[Tensor, "row"], times: int = 1) -> Float32[Tensor, "row column"]:
    """A public function with shapes."""
    return values * factors[:, None] * times if times else values.sum(1)


@checked
def counted(values: Int64[Tensor, "row"]) -> int:
    return len(values)


def test_what_fits_is_taken() -> None:
    assert Table(torch.zeros(2, 3), torch.ones(2, dtype=torch.bool)).name == "table"
    assert torch.equal(scaled(torch.ones(2, 3), torch.tensor([1.0, 2.0]), times=2).sum(1), torch.tensor([6.0, 12.0]))
    assert counted(torch.zeros(3, dtype=torch.int64)) == 3
    assert scaled.__name__ == "scaled"


@pytest.mark.parametrize(
    ("values", "chosen", "says"),
    [
        (torch.zeros(2, 3), torch.ones(3, dtype=torch.bool), "Table.chosen: axis 'row' is 3, but 2 in Table.values"),
        (torch.zeros(2, 3), torch.ones(2), "Table.chosen has dtype float32"),
        (torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, dtype=torch.bool), "Table.values has dtype float64"),
        (torch.zeros(2), torch.ones(2, dtype=torch.bool), "Table.values has shape (2,), but is declared Float32[Tensor, 'row column']"),
        ([[0.0]], torch.ones(1, dtype=torch.bool), "Table.values must be a tensor Float32[Tensor, 'row column'], but is a list"),
    ],
)
def test_a_record_names_the_field_and_the_axis_or_dtype_that_is_wrong(values: Tensor, chosen: Tensor, says: str) -> None:
    with pytest.raises(ShapeError) as caught:
        _ = Table(values, chosen)
    assert says in str(caught.value).replace('"', "'")


def test_a_function_names_itself_and_the_argument() -> None:
    with pytest.raises(ShapeError, match=r"scaled: [\s\S]*factors"):
        _ = scaled(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ShapeError, match=r"counted: [\s\S]*values"):
        _ = counted(torch.ones(3))


def test_a_functions_result_is_checked_too() -> None:
    with pytest.raises(ShapeError, match=r"scaled: [\s\S]*return"):
        _ = scaled(torch.ones(2, 3), torch.ones(2), times=0)


def test_an_error_inside_passes() -> None:
    @checked
    def stumble(values: Int64[Tensor, "row"]) -> int:
        return 1 // (len(values) - 3)

    with pytest.raises(ZeroDivisionError):
        _ = stumble(torch.zeros(3, dtype=torch.int64))

"""`ops.transfer` against cast, copy and checksum one after the other; its kernel is compared on a GPU by tests/benchmarks/sync.py."""

import pytest
import torch

from rft.ops.checksum import checksum
from rft.ops.transfer import standing, transfer


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_it_writes_the_cast_values_and_returns_their_checksum(source: torch.dtype, target: torch.dtype) -> None:
    torch.manual_seed(0)
    values, place = torch.randn(37, 19).to(source), torch.zeros(37, 19, dtype=target)
    (read,) = transfer([(place, values)])
    assert torch.equal(place, values.to(target))
    assert int(read) == int(checksum(values.to(target))) == int(standing([place]))


def test_views_are_written_in_place() -> None:
    """A slice of columns, as a TP rank holds it."""
    whole, part = torch.zeros(8, 10), torch.randn(8, 4)
    (read,) = transfer([(whole[:, 3:7], part)])
    assert torch.equal(whole[:, 3:7], part)
    assert int(whole.count_nonzero()) == part.numel()
    assert int(read) == int(standing([whole[:, 3:7]]))

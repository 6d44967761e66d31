"""`ops.transfer` against cast, copy and checksum one after the other; its kernel is compared on a GPU by tests/benchmarks/sync.py."""

import pytest
import torch

from rft.ops import transfer as transfers
from rft.ops.checksum import checksum, multipliers
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


def test_the_kernel_is_told_where_each_tensor_lies_and_which_program_has_which_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_sent", lambda numbers, _: torch.as_tensor(numbers, dtype=torch.int64))
    a_program = transfers.WORDS * transfers.ROUNDS
    sizes = (8, 4 * a_program, 4 * a_program + 4, 9 * a_program)  # in bfloat16, of which four make a word
    pairs = [(torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size)) for size in sizes]
    transfers._told.cache_clear()
    launch = transfers._Launch(pairs)
    again = transfers._Launch(pairs)
    assert again._jobs is launch._jobs  # nothing has moved
    transfers._told.cache_clear()
    programs = [1, 1, 2, 3]
    rows = launch._jobs.view(-1, 4).tolist()
    for number, (target, source) in enumerate(pairs):
        assert rows[number] == [source.data_ptr(), target.data_ptr(), target.numel() // 4, sum(programs[:number])]
    assert launch._owners.tolist() == [number for number, count in enumerate(programs) for _ in range(count)]
    factor = int(multipliers(torch.device("cpu"))[0])
    assert [int(total) % 2**64 for total in launch._begin] == [2 * size * factor % 2**64 for size in sizes]

"""`ops.checksum` against arithmetic in Python, and what it must notice."""

import pytest
import torch

from rft.ops import checksum as module
from rft.ops.checksum import COLUMNS, checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def by_hand(tensor: torch.Tensor) -> int:
    """The definition, word by word, in Python's integers."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    multipliers = module.multipliers(torch.device("cpu")).tolist()
    words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    total = sum(w * multipliers[i % COLUMNS] for i, w in enumerate(words)) + multipliers[0] * len(data)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (COLUMNS * 9,), (3, COLUMNS * 5 + 1)])
def test_it_is_its_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(shape) * 100).to(dtype)
    # The last word of a tensor of odd size is padded with zeros, which a signed reading of fewer bytes is not: compare the padded one.
    if tensor.nbytes % 8 == 0:
        assert int(checksum(tensor)) == by_hand(tensor)
    assert int(checksum(tensor)) == int(checksum(tensor.clone()))


def test_multipliers_are_odd_and_different() -> None:
    multipliers = module.multipliers(torch.device("cpu"))
    assert bool((multipliers % 2 != 0).all())
    assert len(multipliers.unique()) == COLUMNS


def test_any_single_bit_shows() -> None:
    tensor = torch.randn(300)
    before = int(checksum(tensor))
    bits = tensor.view(torch.int32)
    for index in (0, 1, 150, 299):
        for bit in range(32):
            mask = torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
            bits[index] ^= mask
            assert int(checksum(tensor)) != before
            bits[index] ^= mask
    assert int(checksum(tensor)) == before


@pytest.mark.parametrize("block", [1, 64, 4096, 8192, 65536])
def test_swapped_blocks_show(block: int) -> None:
    """Two blocks changing places: heads, fused projections; powers of two are the usual sizes."""
    tensor = torch.randn(8, block)
    swapped = tensor[[0, 1, 5, 3, 4, 2, 6, 7]]
    assert int(checksum(tensor)) != int(checksum(swapped))


def test_length_and_dtype_show() -> None:
    assert len({int(checksum(torch.zeros(n))) for n in range(20)}) == 20
    assert int(checksum(torch.ones(8))) != int(checksum(torch.ones(8, dtype=torch.bfloat16)))


def test_strides_do_not() -> None:
    tensor = torch.randn(64, 96)
    assert int(checksum(tensor.t())) == int(checksum(tensor.t().contiguous()))
    assert int(checksum(tensor[:, 8:40])) == int(checksum(tensor[:, 8:40].clone()))
    assert int(checksum(tensor.view(-1)[1:])) == int(checksum(tensor.view(-1)[1:].clone()))


def test_it_stays_on_the_device_and_has_no_shape() -> None:
    result = checksum(torch.randn(5))
    assert result.shape == ()
    assert result.dtype == torch.int64

"""What an engine's specification says of a model, before anything is started."""

from types import SimpleNamespace

import pytest

from rft.errors import BadInput
from rft.spec import VLLMEngine


@pytest.mark.parametrize(("heads", "shared", "parallel"), [(8, 8, 3), (24, 8, 3), (12, 4, 6)])
def test_heads_that_tensor_parallelism_cannot_deal_out(heads: int, shared: int, parallel: int) -> None:
    with pytest.raises(BadInput, match=f"tensor_parallel={parallel} "):
        VLLMEngine().check(SimpleNamespace(num_attention_heads=heads, num_key_value_heads=shared), parallel)


@pytest.mark.parametrize(("heads", "shared", "parallel"), [(24, 8, 4), (24, 8, 24), (12, 2, 4), (8, 1, 8)])
def test_heads_that_are_shared_or_repeated(heads: int, shared: int, parallel: int) -> None:
    assert VLLMEngine().check(SimpleNamespace(num_attention_heads=heads, num_key_value_heads=shared), parallel) is None

from pathlib import Path

import pytest

from tests.memory.test_sharding import compare, models

__all__ = ["models"]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_zero_holds_what_was_planned(models: Path, ranks: int):
    assert compare(models, "deepspeed", ranks) == 24 * ranks

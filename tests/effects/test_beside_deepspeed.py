"""Frozen models, sharded as under FSDP2, beside an Actor under DeepSpeed."""

from typing import Any

import pytest

from tests.effects.company import *  # noqa: F403
from tests.effects.company import launched

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(models: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launched(models, tmp_path_factory.mktemp("results"), "zero 3")

"""FSDP2 with images."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainers import oracle
from tests.trainers.seeing import *  # noqa: F403
from tests.trainers.seeing import launched


@pytest.fixture(scope="module")
def seen(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launched(models, tmp_path_factory.mktemp("results"), "fsdp2")["fsdp2"]


def test_sharding_after_use_changes_no_gradient(seen: list[dict[str, Any]], plain: Any) -> None:
    for rank in seen:
        assert oracle.distance(rank["gradients"]["resharded"]["gradient"], plain[0]) <= 1e-5

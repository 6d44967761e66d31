"""ZeRO with images."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainers.seeing import *  # noqa: F403
from tests.trainers.seeing import launched

STAGES = ("zero 2", "zero 3")


@pytest.fixture(scope="module")
def both(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return launched(models, tmp_path_factory.mktemp("results"), *STAGES)


@pytest.fixture(scope="module", params=STAGES)
def seen(request: pytest.FixtureRequest, both: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return both[request.param]

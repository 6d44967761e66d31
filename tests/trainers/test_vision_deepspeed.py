"""ZeRO with images."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.seeing import *  # noqa: F403
from tests.trainers.seeing import launched

QUICK, SLOW = ("zero 3",), ("zero 1", "zero 2", "zero 2, offloaded", "zero 3, offloaded")


@pytest.fixture(scope="module")
def runs(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], dict[str, list[dict[str, Any]]]]:
    return functools.cache(lambda stages: launched(models, tmp_path_factory.mktemp("results"), *stages))


@pytest.fixture(scope="module", params=[*QUICK, *(pytest.param(stage, marks=pytest.mark.slow) for stage in SLOW)])
def seen(request: pytest.FixtureRequest, runs: Any) -> list[dict[str, Any]]:
    return runs(QUICK if request.param in QUICK else SLOW)[request.param]

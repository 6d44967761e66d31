"""The contract of trainers, of every stage of DeepSpeed's ZeRO."""

from typing import Any

import pytest

from tests.trainers.backends import ZERO
from tests.trainers.contract import *  # noqa: F403
from tests.trainers.contract import results

CASES = [pytest.param((ranks, backend), id=f"{backend}, {ranks} ranks") for ranks in (1, 2) for backend in ZERO]


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    ranks, backend = request.param
    return results(launched(ranks, ZERO) / backend, ranks)

"""The contract of trainers, of every stage of DeepSpeed's ZeRO."""

from typing import Any

import pytest

from tests.trainers.backends import LAUNCHES_OF_ZERO
from tests.trainers.contract import *  # noqa: F403
from tests.trainers.contract import cases, results


@pytest.fixture(scope="module", params=cases(LAUNCHES_OF_ZERO))
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    ranks, together, backend = request.param
    return results(launched(ranks, together) / backend, ranks)

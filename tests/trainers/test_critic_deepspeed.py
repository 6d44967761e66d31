"""The contract of critics, with DeepSpeed: on a model of its own, and on the hidden states of an Actor whose weights are in shards."""

from typing import Any

import pytest

from tests.trainers.critic_contract import *  # noqa: F403
from tests.trainers.critic_contract import results

BACKENDS = ("zero 2", "zero 3", "shared, zero 3")
ALONE = [pytest.param((1, backend), id=f"{backend}, 1 rank", marks=pytest.mark.slow) for backend in BACKENDS]
CASES = [*ALONE, *(pytest.param((2, backend), id=f"{backend}, 2 ranks") for backend in BACKENDS)]


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    ranks, backend = request.param
    return results(launched(ranks, BACKENDS), ranks, backend)

"""The contract of critics, with DeepSpeed: on a model of its own, and on the hidden states of an Actor whose weights are in shards."""

from typing import Any

import pytest

from tests.trainers.critic_contract import *  # noqa: F403
from tests.trainers.critic_contract import results

pytestmark = pytest.mark.slow  # what the backends have in common is in the contract of trainers, which is quick
BACKENDS = ("zero 2", "zero 3", "shared, zero 3")
CASES = [pytest.param((ranks, backend), id=f"{backend}, {ranks} ranks") for ranks in (1, 2) for backend in BACKENDS]


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    ranks, backend = request.param
    return results(launched(ranks, BACKENDS), ranks, backend)

"""LoRA under DeepSpeed's ZeRO: the contract."""

from typing import Any

import pytest

from tests.trainers.contract import results
from tests.trainers.lora_contract import *  # noqa: F403

QUICK = (2, ("zero 3",))
SLOW = ((2, ("zero 1", "zero 2", "zero 3, offloaded")), (1, ("zero 2", "zero 3")))
LAUNCHES = [
    pytest.param((ranks, backends, backend), id=f"{backend}, {ranks} ranks", marks=() if (ranks, backends) == QUICK else pytest.mark.slow)
    for ranks, backends in (QUICK, *SLOW)
    for backend in backends
]


@pytest.fixture(scope="module", params=LAUNCHES)
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    ranks, backends, backend = request.param
    return results(launched(ranks, backends) / backend, ranks)

"""LoRA under DeepSpeed's ZeRO: the contract."""

from typing import Any

import pytest

from tests.trainers.contract import results
from tests.trainers.lora_contract import *  # noqa: F403

ZERO = ("zero 2", "zero 3")
CASES = [
    pytest.param((ranks, backend), id=f"{backend}, {ranks} ranks", marks=pytest.mark.slow if ranks == 1 else ())
    for ranks in (2, 1)
    for backend in ZERO
]


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    ranks, backend = request.param
    return results(launched(ranks, ZERO) / backend, ranks)

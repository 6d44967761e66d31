"""The contract of trainers, of every stage of DeepSpeed's ZeRO."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainers import contract
from tests.trainers.backends import LAUNCHES_OF_ZERO, QUICK_OF_ZERO
from tests.trainers.contract import *  # noqa: F403
from tests.trainers.contract import cases, results


@pytest.fixture(scope="module", params=cases(LAUNCHES_OF_ZERO))
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    ranks, together, backend = request.param
    return results(launched(ranks, together) / backend, ranks)


def test_the_optimizer_may_stay_on_the_host(launched: Any, models: Path) -> None:
    """The rest of the contract is slow there."""
    ranks, together, _ = QUICK_OF_ZERO
    offloaded = results(launched(ranks, together) / "zero 2, offloaded", ranks)
    contract.test_five_steps_are_those_of_a_plain_loop(offloaded, models)
    contract.test_going_to_the_host_and_back_changes_nothing(offloaded)
    contract.test_a_trainer_goes_on_from_what_another_saved("float32", offloaded)
    contract.test_a_trainer_goes_on_from_what_another_saved("bfloat16", offloaded)
    contract.test_what_is_saved_depends_on_no_backend_and_no_number_of_ranks(offloaded, models)

"""Requests over the engines of four ranks: each is generated once, and its completion comes back to its own rank."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.effects.sharing_ranks import CASES, prompt
from tests.launching import torchrun

SCRIPT = Path(__file__).with_name("sharing_ranks.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("sharing")
    _ = torchrun(SCRIPT, out, ranks=4)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("name", CASES)
def test_everyone_gets_its_own_completions_in_order(name: str, told: list[dict[str, Any]]) -> None:
    for rank, count in enumerate(CASES[name]):
        assert told[rank][name]["got"] == [request.seed for number in range(count) for request in prompt(rank, number)]


@pytest.mark.parametrize("name", CASES)
def test_each_request_is_generated_by_one_engine_whose_ranks_agree(name: str, told: list[dict[str, Any]]) -> None:
    asked = [told[rank][name]["asked"] for rank in range(4)]
    assert asked[0] == asked[1]
    assert asked[2] == asked[3]
    every = [request.seed for rank, count in enumerate(CASES[name]) for number in range(count) for request in prompt(rank, number)]
    assert sorted(asked[0] + asked[2]) == sorted(every)


def test_prompts_stay_where_they_are_if_that_is_even_and_go_with_all_their_samples_if_not(told: list[dict[str, Any]]) -> None:
    assert {seed // 1000 for seed in told[0]["even"]["asked"]} == {0, 1}
    assert {seed // 1000 for seed in told[2]["even"]["asked"]} == {2, 3}
    first, second = (told[rank]["all on one rank"]["asked"] for rank in (0, 2))
    assert len(first) == len(second) == 12
    assert {seed // 10 for seed in first}.isdisjoint({seed // 10 for seed in second})

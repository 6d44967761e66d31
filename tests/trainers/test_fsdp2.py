"""The contract of trainers, of FSDP2; and what is its own."""

from pathlib import Path
from typing import Any

import pytest

from tests.trainers import backends, oracle
from tests.trainers.backends import LAUNCHES_OF_FSDP2
from tests.trainers.contract import *  # noqa: F403
from tests.trainers.contract import cases, results


@pytest.fixture(scope="module", params=cases(LAUNCHES_OF_FSDP2))
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    ranks, together, backend = request.param
    return results(launched(ranks, together) / backend, ranks)


@pytest.mark.parametrize("case", ["resharded", "checkpointed, resharded"])
def test_sharding_after_use_changes_no_gradient(case: str, seen: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    for rank in seen:
        assert oracle.distance(rank["gradients"][case]["gradient"], plain["tied"][0]) <= 1e-5


def test_one_rank_streams_without_a_copy(seen: list[dict[str, Any]]) -> None:
    assert set(seen[0]["one_rank_copies_nothing"]) == {sharers(seen) == 1}


def test_bytes_are_those_of_the_shards(seen: list[dict[str, Any]], models: Path) -> None:
    shapes = [p.shape for p in oracle.plain_model(models / "uneven").parameters()]
    count = sharers(seen)
    for number, rank in ((n % count, rank) for n, rank in enumerate(seen)):
        rows = [-(-shape[0] // count) for shape in shapes]
        own = [max(0, min(most, shape[0] - number * most)) for most, shape in zip(rows, shapes, strict=True)]
        weights, moments = (sum(4 * n * s[1:].numel() for n, s in zip(count, shapes, strict=True)) for count in (rows, own))
        expected = [0, 0] if "offloaded" in rank["backend"] else [weights, 2 * moments]  # weights are padded
        assert rank["placement"]["sizes"] == rank["placement"]["after"] == expected


def sharers(seen: list[dict[str, Any]]) -> int:
    return backends.shards(seen[0]["backend"]) or len(seen)

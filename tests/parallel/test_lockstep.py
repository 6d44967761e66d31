import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launching import torchrun
from tests.parallel.jobs import job

HERE = Path(__file__).parent
Results = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What two ranks saw in the scenes of `meeting.py`."""
    folder = tmp_path_factory.mktemp("meeting")
    _ = torchrun(HERE / "meeting.py", folder)
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    return first, second


def scene(results: Results, name: str) -> Results:
    return results[0][name], results[1][name]


# ---- ranks that are not together ----


def test_ranks_at_different_steps_are_told_who_is_where(results: Results) -> None:
    for seen in scene(results, "at different steps"):
        assert seen["error"] == "RanksDiverged"
        assert "not at the same step" in seen["message"]
        assert re.search(r"rank 0: offload_actor \(generation 0\).*\n  rank 1: broadcast \(generation 0\)", seen["message"])
        assert seen["untouched"]
        assert "broadcast" in seen["legal"]
        assert seen["generation after"] == 1


def test_ranks_with_different_roles_of_the_same_step_too(results: Results) -> None:
    there = r"rank 0: reload of role REFERENCE \(generation 0\).*\n  rank 1: reload of role reward_model\('kind'\) \(generation 0\)"
    for seen in scene(results, "with different roles"):
        assert seen["error"] == "RanksDiverged"
        assert re.search(there, seen["message"])
        assert seen["untouched"]
        assert seen["generation after"] == 1


def test_ranks_at_different_generations_of_the_same_step_too(results: Results) -> None:
    for seen in scene(results, "at different generations"):
        assert seen["error"] == "RanksDiverged"
        assert re.search(r"rank 0: broadcast \(generation 0\).*\n  rank 1: broadcast \(generation 1\)", seen["message"])
        assert seen["untouched"]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_does_not_come_in_time_is_given_up_and_learns_it(results: Results, who: int) -> None:
    for seen in scene(results, f"late rank {who}"):
        assert seen["error"] == "RanksDiverged"
        assert "not every rank came to wake (generation 1) within 2 s" in seen["message"]
        assert f"rank {who}: not here; last seen at broadcast (generation 0)" in seen["message"]
        assert f"rank {1 - who}: wake (generation 1)" in seen["message"]
        assert seen["untouched"]


def test_a_rank_that_hangs_in_a_collective_is_ended_with_last_words(tmp_path: Path) -> None:
    with job(HERE / "hanging.py", folder=tmp_path) as running:
        _ = running.wait()
        output = running.output()
    assert running.agents[0].returncode
    assert "RanksDiverged: not every rank came to wake (generation 1) within 3 s" in output
    assert "rank 1: not here; last seen at broadcast (generation 0)" in output
    _, _, words = output.partition("ended by SIGTERM; where the ranks were:\n")
    assert re.search(r"  rank 0: already at wake \(generation 1\).*\n  rank 1: broadcast \(generation 0\)", words)
    assert "exitcode  : 143" in words, "rank 1 ended by itself, at once"


# ---- failures of one rank ----


def test_an_engine_that_fails_on_one_rank_is_poisoned_on_all_and_recovers_on_all(results: Results) -> None:
    first, second = scene(results, "an engine that fails")
    assert (first["error"], first["cause"]) == ("EngineFailed", "PeerFailed")
    assert "rank 1: InjectedFault: engine.load was made to fail" in first["message"]
    assert (second["error"], second["cause"]) == ("EngineFailed", "InjectedFault")
    for seen in (first, second):
        assert seen["legal"] == ["recover", "restore"]
        assert seen["rows after"] == 4


def test_no_rank_waits_in_a_collective_for_one_whose_engine_has_failed(results: Results) -> None:
    """Not until the deadline, either: each of these is heard of at once, and `recover` leads on."""
    first, second = scene(results, "a verb that fails before what is collective")
    for failed in ("wake_weights, wake", "wake_cache, wake", "score, wake", "score, broadcast", "flush, broadcast", "load, broadcast"):
        kind, cause, message = first[failed]
        assert (kind, cause) == ("EngineFailed", "PeerFailed"), failed
        assert "rank 1: " in message, failed
        assert second[failed][:2] == ["EngineFailed", "KeyError" if failed.startswith("load") else "InjectedFault"], failed
    assert [seen["rows after"] for seen in (first, second)] == [4, 4]


def test_manifests_that_differ_stop_a_broadcast_before_anything_is_touched(results: Results) -> None:
    for seen in scene(results, "manifests that differ"):
        assert seen["error"] == "SyncFailed"
        assert "the ranks would send different tensors" in seen["message"]
        assert seen["untouched"]
        assert "broadcast" in seen["legal"]


def test_memory_that_is_short_on_one_rank_is_refused_on_all(results: Results) -> None:
    for seen in scene(results, "memory on one rank"):
        assert seen["error"] == "DoesNotFit"
        assert "rank 1:\n" in seen["message"]
        assert "rank 0:" not in seen["message"]
        assert seen["untouched"]
        assert "broadcast" in seen["legal"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("another batch on one rank", "WrongBatch"),
        ("a long prompt on one rank", "BadInput"),
        ("sampling of a wrong type on one rank", "BadInput"),
        ("a column of words on one rank", "BadInput"),
        ("old rollouts on one rank", "TooStale"),
    ],
)
def test_what_one_rank_refuses_all_refuse(results: Results, name: str, error: str) -> None:
    first, second = scene(results, name)
    assert first["error"] == "PeerFailed"
    assert f"rank 1: {error}: " in first["message"]
    assert second["error"] == error
    for seen in (first, second):
        assert seen["untouched"]
        assert "generate" in seen["legal"]
        assert seen.get("version after", 1) == 1


def test_a_prompt_that_two_ranks_have_is_refused_on_both_by_name(results: Results) -> None:
    for seen in scene(results, "the same prompt on two ranks"):
        assert seen["error"] == "BadInput"
        assert "ranks 0 and 1 both have prompt 0 of epoch 0" in seen["message"]
        assert "Share(index=rank, count=ranks)" in seen["message"]
        assert seen["untouched"]
        assert seen["rows after"] == 4, "in another draw they may: the responses differ"


def test_ranks_that_sample_in_two_ways_are_refused(results: Results) -> None:
    """Their engines share the prompts. How many samples each has is its own matter."""
    for rank, seen in enumerate(scene(results, "ranks that sample in two ways")):
        assert seen["error"] == "BadInput"
        assert "Sampling.temperature is 1.0 on rank 0 and 0.5 on rank 1" in seen["message"]
        assert seen["untouched"]
        assert seen["rows after"] == 2 * (1 + rank)


# ---- what they do together ----


def test_columns_that_differ_have_no_average_on_any_rank(results: Results) -> None:
    for rank, seen in enumerate(scene(results, "other columns on one rank")):
        assert seen["error"] == "BadInput"
        assert ("'reward', 'length', and rank 0 'reward'" if rank else "'reward', and rank 1 'reward', 'length'") in seen["message"]
        assert seen["untouched"]


def test_places_are_torchruns(results: Results) -> None:
    for rank, seen in enumerate(scene(results, "place without TP")):
        assert seen == {"rank": rank, "size": 2, "tp_rank": 0, "tp_size": 1, "dp_rank": rank, "dp_size": 2}
    for rank, seen in enumerate(scene(results, "place with TP")):
        assert seen == {"rank": rank, "size": 2, "tp_rank": rank, "tp_size": 2, "dp_rank": 0, "dp_size": 1}


@pytest.mark.parametrize("name", ["own share", "own share without TP"])
def test_a_rank_takes_back_its_own_share_whatever_it_shared_an_engine_with(results: Results, name: str) -> None:
    first, second = scene(results, name)
    assert first["groups"] == [0, 0, 1, 1, 2, 2]
    assert second["groups"] == [10, 10]
    assert first["same"]
    assert second["same"]
    assert first["tokens"] == results[0]["own share"]["tokens"]


def test_averages_are_over_the_entries_of_all_ranks(results: Results) -> None:
    for seen in scene(results, "averages"):
        assert seen["x"] == 3.0
        assert seen["none"] != seen["none"]


def test_small_values_come_from_all_ranks_however_long_they_are(results: Results) -> None:
    for seen in scene(results, "values of any length"):
        lengths = [[len(value) for value in values] for values in seen["values"]]
        assert lengths[0] == [1, 1]
        assert lengths[1][0] + 1 == lengths[2][0]
        assert lengths[3] == [1, 5000]
        assert all(value.endswith(str(rank)) for values in seen["values"] for rank, value in enumerate(values))

"""Checkpoints of several ranks: shards that are read at any number of ranks, and failures of one rank that all hear of."""

import json
from pathlib import Path
from typing import Any

import pytest

from rft.checkpoint import folder
from tests.checkpoint.ranks import SHAPES, whole
from tests.launching import torchrun

SCRIPT = Path(__file__).with_name("ranks.py")
FULL = "No space left on device"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks write, and read; then one of them meets things that the other does not."""
    out = tmp_path_factory.mktemp("ranks")
    _ = torchrun(SCRIPT, "write,read,differ", out, timeout=240)
    return out


def seen(out: Path, scene: str, ranks: int = 2) -> list[Any]:
    return [json.loads((out / f"{scene}-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]


def right(value: int) -> dict[str, Any]:
    return {**{f"model.{name}": whole(name, value).double().tolist() for name in SHAPES}, "optimizer.steps": value}


def test_two_ranks_write_each_its_own_and_read_it_back(out: Path) -> None:
    wrote, read = seen(out, "write"), seen(out, "read")
    for rank in range(2):
        assert read[rank]["values"] == right(5)
        assert read[rank]["run"] == {"step": 1}
        assert read[rank]["random"] == wrote[rank]["random"]
        assert f"random/{rank:05}.json" in wrote[rank]["files"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_reads_it_too_and_says_what_is_not_there(out: Path, ranks: int) -> None:
    printed = torchrun(SCRIPT, "read", out, ranks=ranks, timeout=240)
    for rank, read in enumerate(seen(out, "read", ranks)):
        assert read["values"] == right(5)
        assert (read["random"] == seen(out, "write")[rank]["random"]) if rank < 2 else "random states of rank 2 are not in it" in printed


def test_what_differs_between_ranks_is_refused_by_its_path(out: Path) -> None:
    for told in seen(out, "differ"):
        assert "BadInput: save(state, folder, run): run['mine'] is 0 on rank 0 and 1 on rank 1" in told["other values"]
        assert told["no folder yet"] is False
        assert told["legal"]
    first, second = (told["not savable"] for told in seen(out, "differ"))
    assert first.startswith("PeerFailed: ")
    assert second.startswith("BadInput: ")
    assert "run['x'] is a builtins.object" in first
    first, second = (told["other structure"] for told in seen(out, "differ"))
    assert first.startswith("BadInput: ")
    assert second.startswith("PeerFailed: ")
    assert all("x.model.wide is not in the checkpoint" in told["other names"] for told in seen(out, "differ"))


def test_arguments_that_differ_between_ranks_are_refused_with_both_values(out: Path) -> None:
    for told in seen(out, "differ"):
        own = [repr(str(out / f"own{rank}")) for rank in range(2)]
        for message, call, name, first, second in zip(
            told["other arguments"],
            ("save(state, folder, run)", "save(state, folder, run)", "restore(state, folder, run)", "export(state, path)"),
            ("folder", "keep", "folder", "path"),
            (own[0], 2, own[0], own[0]),
            (own[1], 3, own[1], own[1]),
            strict=True,
        ):
            assert f"BadInput: {call}: {name} is {first} on rank 0 and {second} on rank 1; " in message
        assert told["own folders"] == []
    first, second = (told["file"] for told in seen(out, "differ"))
    assert first.startswith("PeerFailed: ")
    assert "file-of-1'): there is a file of that name" in first
    assert second.startswith("BadInput: ")


def test_a_disk_that_fails_one_rank_fails_all_and_leaves_nothing(out: Path) -> None:
    first, second = seen(out, "differ")
    for told in (first, second):
        assert told["other file"].startswith("CheckpointFailed: ")
        assert "rank 1: " in told["other file"]
        assert FULL in told["other file"]
        assert told["left"] == ["checkpoint-000001-version-0"]
    assert first["no random states"].startswith("PeerFailed: ")
    assert second["no random states"].startswith(
        "CheckpointFailed: save(state, folder, run): the checkpoint could not be written; older ones are as they were"
    )
    assert folder.newest_checkpoint(out / "b") is not None

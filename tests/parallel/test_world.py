import datetime
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

from rft.errors import BadInput, RanksDiverged
from rft.parallel.world import _problem, _roll_call, dp_groups, open_world, quick_dtype, tp_groups


@pytest.mark.parametrize(
    ("size", "tp", "tp_ranks", "dp_ranks"),
    [
        (8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (8, 4, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (8, 1, [[0], [1], [2], [3], [4], [5], [6], [7]], [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (2, 2, [[0, 1]], [[0], [1]]),
        (1, 1, [[0]], [[0]]),
    ],
)
def test_groups_are_those_of_torchrun_users(size: int, tp: int, tp_ranks: list[list[int]], dp_ranks: list[list[int]]) -> None:
    assert tp_groups(size, tp) == tp_ranks
    assert dp_groups(size, tp) == dp_ranks


@pytest.mark.parametrize(("size", "tp"), [(8, 3), (2, 4), (1, 2), (4, 0), (4, -1)])
def test_a_world_that_tp_does_not_divide_is_refused(size: int, tp: int) -> None:
    for groups in (tp_groups, dp_groups):
        with pytest.raises(BadInput, match=f"tensor_parallel={tp} does not divide the world size {size}"):
            _ = groups(size, tp)


def test_it_is_refused_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(BadInput, match="start torchrun with a multiple of 2 processes"):
        _ = open_world(2, timeout_s=5)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "RANK=0 and WORLD_SIZE=2, and no MASTER_ADDR where the ranks meet; start with torchrun"),
        ({"RANK": "1"}, "RANK=1 and WORLD_SIZE=1, and no MASTER_ADDR"),
        ({"RANK": "x"}, "RANK='x', which is no whole number; start with torchrun, which sets it, or unset it"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE='-1', which is no whole number"),
    ],
)
def test_an_environment_that_torchrun_does_not_make_is_refused(monkeypatch: pytest.MonkeyPatch, said: dict[str, str], says: str) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, said.get(name, "to be put back"))
        if name not in said:
            monkeypatch.delenv(name)
    with pytest.raises(BadInput, match=says):
        _ = open_world(1, timeout_s=5)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("here", "tp", "refused"), [("2", 4, True), ("3", 2, True), ("4", 2, False), ("8", 8, False), (None, 8, False)])
def test_a_tp_group_over_two_nodes_is_a_problem(monkeypatch: pytest.MonkeyPatch, here: str | None, tp: int, refused: bool) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    problem = _problem(tp, 24)
    assert (problem is not None) is refused
    assert problem is None or f"start torchrun with a multiple of {tp} per node" in problem


def test_more_ranks_than_gpus_on_a_node_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for local, expected in (("1", False), ("2", True)):
        monkeypatch.setenv("LOCAL_RANK", local)
        assert ("where 2 GPUs are visible" in (_problem(1, 4) or "")) is expected


def test_a_rank_that_does_not_come_to_the_roll_call_is_named() -> None:
    store = PrefixStore("world", HashStore())
    store.set("there/2", "")
    with pytest.raises(RanksDiverged, match=r"of 4 ranks, rank 1, 3 did not come to launch within 0\.2 s"):
        _ = _roll_call(store, 0, 4, None, datetime.timedelta(seconds=0.2))


def test_a_problem_of_one_rank_is_told_to_all() -> None:
    store = PrefixStore("world", HashStore())
    store.set("there/1", "no GPU")
    assert _roll_call(store, 0, 2, None, datetime.timedelta(seconds=5)) == {0: "", 1: "no GPU"}


def test_without_torchrun_a_rank_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "to be put back")
        monkeypatch.delenv(name)
    try:
        world = open_world(1, timeout_s=5)
        assert (world.rank, world.size, world.tp_size, world.dp_size) == (0, 1, 1, 1)
        assert dist.get_world_size(world.host) == 1
    finally:
        dist.destroy_process_group()
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            _ = os.environ.pop(name, None)


@pytest.mark.parametrize(
    ("instructions", "dtype"),
    [
        ({"avx2": True, "avx512_bf16": False}, "float32"),
        ({"avx2": True, "avx512_bf16": True}, "bfloat16"),
        ({"neon": True, "bf16": True}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_what_a_processor_is_quick_in(instructions: dict[str, bool], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    assert quick_dtype() == dtype
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert quick_dtype() == "bfloat16"

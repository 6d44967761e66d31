import os

import pytest
import torch.distributed as dist

from rft.errors import BadInput
from rft.parallel.world import dp_groups, open_world, tp_groups


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

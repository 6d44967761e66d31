import dataclasses as dc
import os
import time
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from rft.parallel import board as module
from rft.parallel.board import Board, Word, told
from rft.parallel.whereabouts import Whereabouts
from rft.parallel.world import World

ALONE = World(rank=0, size=3, tp_rank=0, tp_size=1, dp_rank=0, dp_size=3, device=torch.device("cpu"), host=None, tp=None, dp=None)


class Rank:
    """A rank that other ranks, in this same process, see through a store."""

    def __init__(self, number: int, store: Any) -> None:
        self.here = Whereabouts(60.0, spins=False)
        self.board = Board(dc.replace(ALONE, rank=number), self.here, store, "a launch", deadline_s=0.5)

    def end(self, within: float) -> str | None:
        """Why it ends itself, if it does in time."""
        deadline = time.monotonic() + within
        while (why := self.here.overdue()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return why


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    monkeypatch.setattr(module, "TELL_S", 0.05)
    monkeypatch.setattr(module, "SILENCE_S", 2.0)  # a busy machine may hold a thread back for a second
    monkeypatch.setattr("rft.parallel.whereabouts.GRACE_S", 0.1)
    store = HashStore()
    return [Rank(number, store) for number in range(3)]


def test_ranks_read_each_others_words(ranks: list[Rank]) -> None:
    assert ranks[0].board.of(1) is None
    ranks[1].here.comes("broadcast (generation 1)")
    ranks[1].board.tell()
    word = ranks[0].board.of(1)
    assert word is not None
    assert (word.step, word.pid) == ("broadcast (generation 1)", os.getpid())
    assert word.what().startswith("waits there for the others for 0 s")
    assert told("{}", "broadcast (generation 1)", word) == f"broadcast (generation 1); {word.doing}; process {os.getpid()} on {module.HOST}"
    assert told("already at {}", "wake (generation 2)", word) == f"already at wake (generation 2); process {os.getpid()} on {module.HOST}"
    assert told("{}", "wake (generation 2)", None) == "wake (generation 2)"


def test_a_word_says_when_its_rank_is_silent_or_its_process_gone() -> None:
    gone = Word("wake (generation 2)", "in it for 3 s", time.time() - 20, 2**22 + 1, module.HOST)
    assert gone.what() == "in it for 3 s (20 s ago)"
    assert gone.process().endswith(", which has ended")
    elsewhere = dc.replace(gone, host="another-node")
    assert elsewhere.process() == f"process {2**22 + 1} on another-node"


def test_all_ranks_end_when_one_gives_up(ranks: list[Rank]) -> None:
    with ranks[0].board.kept(), ranks[1].board.kept(), ranks[2].board.kept():
        assert ranks[0].end(within=0.6) is None
        ranks[2].board.give_up("rank 0 did not come")
        for rank in ranks[:2]:
            assert rank.end(within=5) == "it has not left `launch` since: rank 2 gave the others up: rank 0 did not come"


def test_a_neighbour_that_falls_silent_ends_the_job(ranks: list[Rank]) -> None:
    with ranks[0].board.kept(), ranks[2].board.kept():
        with ranks[1].board.kept():
            assert ranks[0].end(within=1.0) is None
        for rank in (ranks[0], ranks[2]):
            assert "nothing was heard of rank 1 for 2 s" in (rank.end(within=30) or "")


def test_a_neighbour_that_has_done_its_part_may_be_silent(ranks: list[Rank]) -> None:
    with ranks[0].board.kept(), ranks[2].board.kept():
        with ranks[1].board.kept():
            ranks[1].here.closes(None)
            ranks[1].board.tell(done=True)
        assert ranks[0].end(within=3) is None

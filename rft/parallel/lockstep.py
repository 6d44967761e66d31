"""All ranks at the same step, or an error that names who is where.

Before a step the ranks compare a fingerprint (its name, the state's generation, a count) through the key-value store that torchrun
keeps, which outlives every rank. A rank that took another path, or does not come before the deadline, is an error with a table of
all ranks, not a hang. The first verdict on a meeting holds for all: a rank that comes late learns that it was given up.
"""

import contextlib
import datetime
import itertools
import os
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented as public)

from rft.errors import PeerFailed, RanksDiverged
from rft.parallel.world import World

T = TypeVar("T")
WELL = "all ranks are here"


class Lockstep:
    """The meeting place of the ranks of one launch. All ranks open theirs in the same order."""

    _opened = itertools.count()

    def __init__(self, world: World, deadline_s: float) -> None:
        self._world, self._deadline, self._count = world, datetime.timedelta(seconds=deadline_s), 0
        self._store = self._onlooker = None
        if world.size > 1:
            # Two connections: one that waits for a key serves nobody else.
            self._store, self._onlooker = _connection(self._deadline), _connection(self._deadline)
            self._launch = f"rft/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(Lockstep._opened)}"
        self._at = "launch"

    def meet(self, step: str, generation: int) -> None:
        """Returns when every rank has come to this step. Raises `RanksDiverged` with a table of who is where."""
        self._at, self._count = f"{step} (generation {generation})", self._count + 1
        if self._store is None:
            return
        self._store.set(self._key(self._world.rank), self._at)
        verdict = self._judged(self._store) if self._world.rank == 0 else self._awaited(self._store)
        if verdict != WELL:
            raise RanksDiverged(verdict)

    def table(self) -> str:
        """Where each rank is, as far as it has said so. Safe to call from another thread, while this one waits."""
        own = f"  rank {self._world.rank}: {self._at}"
        if self._onlooker is None:
            return own
        try:
            return "\n".join(f"  rank {rank}: {self._seen(self._onlooker, rank)}" for rank in range(self._world.size))
        except dist.DistError as error:
            return f"{own}\n  where the others are cannot be read any more: {error}"

    def agree(self, failure: Exception | None) -> None:
        """Collective: raises `failure` here, or `PeerFailed` where only other ranks have one. Returns if nobody has."""
        told = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {what}" for rank, what in enumerate(told) if what is not None]
        if failed:
            raise PeerFailed("another rank failed in this step: " + "; ".join(failed))

    @contextlib.contextmanager
    def agreement(self) -> Generator[None]:
        """Collective when it is left: what was raised inside is raised here, and `PeerFailed` on the ranks where nothing was."""
        failure = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 (it is raised again by `agree`, on this rank as itself)
            failure = error
        self.agree(failure)

    def gather(self, value: T) -> list[T]:
        """Collective: the values of all ranks, in rank order. They travel by pickle and are to be small."""
        values = [value] * self._world.size
        if self._world.size > 1:
            dist.all_gather_object(values, value, group=self._world.host)
        return values

    def _judged(self, store: TCPStore) -> str:
        """On rank 0: waits for all, publishes the verdict, and lets the keys of the meeting before the last go."""
        keys = [self._key(rank) for rank in range(self._world.size)]
        try:
            store.wait(keys, self._deadline)
        except dist.DistError:
            verdict = self._late()
        else:
            said: Sequence[bytes] = store.multi_get(keys)
            verdict = WELL if len(set(said)) == 1 else f"the ranks are not at the same step:\n{self.table()}"
        verdict = self._published(store, verdict)
        for who in (*range(self._world.size), "verdict"):
            _ = store.delete_key(self._key(who, self._count - 2))
        return verdict

    def _awaited(self, store: TCPStore) -> str:
        """On the others: the verdict, or that none came."""
        try:
            return store.get(self._key("verdict")).decode()
        except dist.DistError:
            return self._published(store, self._late())

    def _published(self, store: TCPStore, verdict: str) -> str:
        """The verdict that holds: this one, unless there is one already."""
        try:
            return bytes(store.compare_set(self._key("verdict"), "", verdict)).decode()
        except dist.DistError:
            return verdict

    def _seen(self, store: TCPStore, rank: int) -> str:
        """Where a rank is: a meeting ahead of this rank, which has not gone on yet, at the same one, or behind."""
        for meeting, words in ((1, "already at {}"), (0, "{}"), (-1, "not here; last seen at {}")):
            key = self._key(rank, self._count + meeting)
            if store.check([key]):
                return words.format(store.get(key).decode())
        return "not here"

    def _late(self) -> str:
        return f"not every rank came to {self._at} within {self._deadline.total_seconds():g} s:\n{self.table()}"

    def _key(self, who: int | str, count: int | None = None) -> str:
        return f"{self._launch}/{self._count if count is None else count}/{who}"


def _connection(timeout: datetime.timedelta) -> TCPStore:
    """To the store by which the process group was made: it is torchrun's own, or rank 0's where there is no torchrun."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)

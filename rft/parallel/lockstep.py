"""All ranks at the same step, or an error that names who is where.

Before a step the ranks compare a fingerprint (its name, the state's generation, a count) through a small key-value store. A rank
that took another path, or does not come before the deadline, is an error with a table of all ranks, not a hang.
"""

import contextlib
import datetime
import functools
import os
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented as public)

from rft.errors import PeerFailed, RanksDiverged
from rft.parallel.world import World

T = TypeVar("T")


class Lockstep:
    """The meeting place of the ranks of one launch. Opening it is collective."""

    def __init__(self, world: World, deadline_s: float) -> None:
        self._world, self._deadline, self._count = world, datetime.timedelta(seconds=deadline_s), 0
        self._store = self._onlooker = None
        if world.size > 1:
            self._store, self._onlooker = _open_store(world, self._deadline)
        self._at = "launch"

    def meet(self, step: str, generation: int) -> None:
        """Returns when every rank has come to this step. Raises `RanksDiverged` with a table of who is where."""
        self._at, self._count = f"{step} (generation {generation})", self._count + 1
        if self._store is None:
            return
        self._store.set(self._key(self._world.rank), self._at)
        try:
            verdict = self._judge() if self._world.rank == 0 else self._store.get(f"{self._count}/verdict").decode()
        except dist.DistError as error:
            raise RanksDiverged(f"{self._late()}:\n{self.table()}") from error
        if verdict:
            raise RanksDiverged(verdict)

    def table(self) -> str:
        """Where each rank is, as far as it has said so. Safe to call from another thread, while this one waits."""
        if self._onlooker is None:
            return f"  rank {self._world.rank}: {self._at}"
        return "\n".join(f"  rank {rank}: {self._seen(self._onlooker, rank)}" for rank in range(self._world.size))

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

    def _judge(self) -> str:
        """On rank 0: waits for all, publishes the verdict (empty: all is well), and lets the last meeting's keys go."""
        assert self._store is not None
        keys = [self._key(rank) for rank in range(self._world.size)]
        try:
            self._store.wait(keys, self._deadline)
        except dist.DistError:
            verdict = f"{self._late()}:\n{self.table()}"
        else:
            said: Sequence[bytes] = self._store.multi_get(keys)
            verdict = "" if len(set(said)) == 1 else f"the ranks are not at the same step:\n{self.table()}"
        self._store.set(f"{self._count}/verdict", verdict)
        for rank in range(self._world.size):
            _ = self._store.delete_key(f"{self._count - 2}/{rank}")
        _ = self._store.delete_key(f"{self._count - 2}/verdict")
        return verdict

    def _seen(self, store: TCPStore, rank: int) -> str:
        for count in (self._count, self._count - 1):
            if store.check([f"{count}/{rank}"]):
                at = store.get(f"{count}/{rank}").decode()
                return at if count == self._count else f"not here; last seen at {at}"
        return "not here"

    def _late(self) -> str:
        return f"not every rank came to {self._at} within {self._deadline.total_seconds():.0f} s"

    def _key(self, rank: int) -> str:
        return f"{self._count}/{rank}"


def _open_store(world: World, timeout: datetime.timedelta) -> tuple[TCPStore, TCPStore]:
    """The store, and a second connection to it: a connection that waits for a key serves nobody else."""
    host, port = os.environ["MASTER_ADDR"], [0]
    connect = functools.partial(TCPStore, host, timeout=timeout, wait_for_workers=False)
    master = connect(0, is_master=True) if world.rank == 0 else None
    if master is not None:
        port[0] = master.port
    dist.broadcast_object_list(port, src=0, group=world.host)
    return master or connect(port[0], is_master=False), connect(port[0], is_master=False)

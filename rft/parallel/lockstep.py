"""All ranks at the same step, or an error that names who is where.

Before a step the ranks compare a fingerprint (its name, the state's generation, a count) through the key-value store that torchrun
keeps, which outlives every rank. A rank that took another path, or does not come before the deadline, is an error with a table of
all ranks, not a hang. The first verdict on a meeting holds for all: a rank that comes late learns that it was given up.

What each rank is doing lies in the same store (see `board`), so that every table says of all of them where they are and for how long,
on whichever rank it is printed, those that hang included.
"""

import contextlib
import dataclasses as dc
import datetime
import itertools
import os
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented as public)

from rft.errors import PeerFailed, RanksDiverged
from rft.parallel.board import Board, told
from rft.parallel.last_words import last_words, say
from rft.parallel.messages import gathered
from rft.parallel.whereabouts import Whereabouts, lost_others, may_be_alone
from rft.parallel.world import World

T = TypeVar("T")
NEWLINE = "\n"
WELL, APART = "all ranks are here", "the ranks are not at the same step"


@dc.dataclass
class Exchange:
    """What travels with an agreement, in the same collective. As small as what is gathered."""

    own: Any = None
    """Set inside, of this rank."""
    everywhere: list[Any] = dc.field(default_factory=list[Any])
    """Of all ranks, in rank order, once they have agreed."""


class Lockstep:
    """The meeting place of the ranks of one launch. All ranks open theirs in the same order."""

    _opened = itertools.count()

    def __init__(self, world: World, deadline_s: float) -> None:
        self._world, self._deadline, self._count = world, datetime.timedelta(seconds=deadline_s), 0
        self._here = Whereabouts(deadline_s, spins=world.device.type == "cuda")
        self._store = self._board = None
        if world.size > 1:
            # Two connections: one that waits for a key serves nobody else.
            self._store, onlooker = _connection(self._deadline), _connection(self._deadline)
            self._launch = f"rft/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(Lockstep._opened)}"
            self._board = Board(world, self._here, onlooker, self._launch, deadline_s=deadline_s)

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """While it is open this rank tells the others what it is doing, prints the table when it is ended, or asked, by a signal (see
        `last_words`), and ends itself where it must (see `whereabouts`). A rank that is alone waits for nobody, and never must."""
        if self._board is None:
            with last_words(self.table):
                yield
        else:
            with self._board.kept(), last_words(self.table, self._here.overdue, self._board.give_up):
                yield

    def meet(self, step: str, generation: int) -> None:
        """Returns when every rank has come to this step. Raises `RanksDiverged` with a table of who is where."""
        self._count += 1
        self._here.comes(f"{step} (generation {generation})")
        if self._store is not None:
            verdict = self._judged(self._store) if self._world.rank == 0 else self._awaited(self._store)
            if verdict != WELL:
                raise self._diverged(verdict, for_good=not verdict.startswith(APART))
        self._here.enters()

    def leave(self, error: BaseException | None) -> None:
        """The step is over. An error that other ranks may not have is reported at once, with a table of who is where."""
        if error is None:
            self._here.leaves()
            return
        self._here.fails(error)
        lost = lost_others(error)
        if self._board is not None and (lost or may_be_alone(error)):
            self._tell()
            if lost:
                self._board.give_up(f"{self._here.step} {self._here.doing()}")
            say(f"rank {self._world.rank}: {self._here.step} failed; where the ranks are:\n{self.table()}")

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Tells the others that this rank leaves `launch`, and by which error. What an exit stack calls."""
        del kind, trace
        self._here.closes(error)
        self._tell(done=error is None)

    def table(self) -> str:
        """Where each rank is, as far as it has said so. Safe to call from another thread, while this one waits."""
        if self._board is None:
            return f"  rank {self._world.rank}: {self._here.step}; {self._here.doing()}"
        own, board = self._board.own(), self._board
        try:
            return "\n".join(f"  rank {rank}: {self._seen(board, rank)}" for rank in range(self._world.size))
        except dist.DistError as error:
            gone = f"  where the others are cannot be read any more: {str(error).partition(NEWLINE)[0]}"
            return f"  rank {self._world.rank}: {told('{}', own.step, own)}\n{gone}"

    def agree(self, failure: Exception | None) -> None:
        """Collective: raises `failure` here, or `PeerFailed` where only other ranks have one. Returns if nobody has."""
        self._agree(failure, Exchange())

    @contextlib.contextmanager
    def agreement(self) -> Generator[Exchange]:
        """Collective when it is left: what was raised inside is raised here, and `PeerFailed` on the ranks where nothing was."""
        exchange, failure = Exchange(), None
        try:
            yield exchange
        except Exception as error:  # noqa: BLE001 (it is raised again by `_agree`, on this rank as itself)
            failure = error
        self._agree(failure, exchange)

    def _agree(self, failure: Exception | None, exchange: Exchange) -> None:
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        told = self.gather((said, exchange.own))
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {what}" for rank, (what, _) in enumerate(told) if what is not None]
        if failed:
            raise PeerFailed("another rank failed in this step: " + "; ".join(failed))
        exchange.everywhere = [own for _, own in told]

    def gather(self, value: T) -> list[T]:
        """Collective: the values of all ranks, in rank order. They travel by pickle and are to be small.

        Raises `RanksDiverged` where another rank does not come before the deadline, or is gone.
        """
        try:
            return gathered(value, self._world.host, self._world.size)
        except RuntimeError as error:  # gloo has no error of its own
            raise self._diverged(f"the ranks lost each other in {self._here.step} ({error}):\n{self.table()}", for_good=True) from error

    def _tell(self, *, done: bool = False) -> None:
        if self._board is not None:
            with contextlib.suppress(dist.DistError):  # where the store is gone, nobody is left to read it
                self._board.tell(done=done)

    def _diverged(self, verdict: str, *, for_good: bool) -> RanksDiverged:
        error = RanksDiverged(verdict)
        self._here.fails(error)
        self._tell()
        if for_good and self._board is not None:
            self._board.give_up(verdict.partition("\n")[0].rstrip(":"))
        return error

    def _judged(self, store: TCPStore) -> str:
        """On rank 0: waits for all, publishes the verdict, and lets the keys of the meeting before the last go."""
        keys = [self._key(rank) for rank in range(self._world.size)]
        try:
            store.set(keys[0], self._here.step)
            store.wait(keys, self._deadline)
            said: Sequence[bytes] = store.multi_get(keys)
        except dist.DistError as error:
            verdict = self._late(error)
        else:
            verdict = WELL if len(set(said)) == 1 else f"{APART}:\n{self.table()}"
        verdict = self._published(store, verdict)
        if verdict == WELL:
            for who in (*range(self._world.size), "verdict"):
                _ = store.delete_key(self._key(who, self._count - 2))
        return verdict

    def _awaited(self, store: TCPStore) -> str:
        """On the others: the verdict, or that none came."""
        try:
            store.set(self._key(self._world.rank), self._here.step)
            return store.get(self._key("verdict")).decode()
        except dist.DistError as error:
            return self._published(store, self._late(error))

    def _published(self, store: TCPStore, verdict: str) -> str:
        """The verdict that holds: this one, unless there is one already."""
        try:
            return bytes(store.compare_set(self._key("verdict"), "", verdict)).decode()
        except dist.DistError:
            return verdict

    def _seen(self, board: Board, rank: int) -> str:
        """Where a rank is: a meeting ahead of this rank, which has not gone on yet, at the same one, or behind. And what it does there."""
        word = board.of(rank)
        for meeting, words in ((1, "already at {}"), (0, "{}"), (-1, "not here; last seen at {}")):
            key = self._key(rank, self._count + meeting)
            if board.store.check([key]):
                return told(words, board.store.get(key).decode(), word)
        return told("not here; last seen at {}", word.step, word) if word else "not here"

    def _late(self, error: Exception) -> str:
        if isinstance(error, dist.DistNetworkError):
            return f"the store where the ranks meet is gone, and with it torchrun on the first node, or rank 0:\n{self.table()}"
        return f"not every rank came to {self._here.step} within {self._deadline.total_seconds():g} s:\n{self.table()}"

    def _key(self, who: int | str, count: int | None = None) -> str:
        return f"{self._launch}/{self._count if count is None else count}/{who}"


def _connection(timeout: datetime.timedelta) -> TCPStore:
    """To the store by which the process group was made: it is torchrun's own, or rank 0's where there is no torchrun."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)

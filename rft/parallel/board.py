"""What each rank does at the moment, for all to read: it lies in the store that torchrun keeps, and outlives every rank.

Once a second a rank writes what it is doing, looks whether another one has given the job up, and whether its neighbour still writes. So a
rank learns that the job is over where nothing else would tell it: when it is in a call of its own, and the others, or their torchrun,
are on other nodes.
"""

import contextlib
import dataclasses as dc
import json
import os
import socket
import threading
import time
from collections.abc import Generator
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented as public)

from rft.parallel.whereabouts import Whereabouts
from rft.parallel.world import World, under_torchrun

TELL_S = 1.0
"""How often a rank tells what it is doing."""
SILENCE_S = 30.0
"""The least time after which a rank that tells nothing counts as gone; the deadline, if that is longer."""
HOST = socket.gethostname()


@dc.dataclass(frozen=True)
class Word:
    """What a rank said last."""

    step: str
    doing: str
    at: float
    pid: int
    host: str

    def process(self) -> str:
        """`process 4711 on host`, and whether it still runs, where that can be seen from here."""
        ended = self.host == HOST and not _runs(self.pid)
        return f"process {self.pid} on {self.host}" + (", which has ended" if ended else "")

    def what(self) -> str:
        """What the rank is doing, and how long ago it said so, if it has been silent since."""
        silent = time.time() - self.at
        return self.doing + (f" ({silent:.0f} s ago)" if silent > 3 * TELL_S else "")


class Board:
    """This rank's word, and those of the others. Any thread may use it."""

    def __init__(self, world: World, here: Whereabouts, store: TCPStore, name: str, *, deadline_s: float) -> None:
        """`store` is to be a connection that nothing else waits on."""
        self.store, self._rank, self._size, self._here, self._name = store, world.rank, world.size, here, name
        self._neighbour = (world.rank + 1) % world.size
        self._silence = max(deadline_s, SILENCE_S)
        self._heard, self._heard_at = b"", time.monotonic()

    def tell(self, *, done: bool = False) -> None:
        """Writes this rank's word; the last one if it has done its part. Raises `DistError` where the store is gone."""
        self.store.set(self._key(self._rank), json.dumps(dc.asdict(self.own())))
        if done:
            self.store.set(self._key(f"{self._rank} is done"), "")

    def own(self) -> Word:
        """This rank's word."""
        return Word(self._here.step, self._here.doing(), time.time(), os.getpid(), HOST)

    def of(self, rank: int) -> Word | None:
        """The last word of a rank; None where it has not said any."""
        if rank == self._rank:
            return self.own()
        key = self._key(rank)
        return Word(**json.loads(self.store.get(key))) if self.store.check([key]) else None

    def give_up(self, why: str) -> None:
        """Tells all ranks that they are to end, and why; the first reason stays."""
        self._here.given_up(why)
        with contextlib.suppress(dist.DistError):  # the others see for themselves that the store is gone
            _ = self.store.compare_set(self._key("given up"), "", f"rank {self._rank} gave the others up: {why}")

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """While it is open, a thread tells and looks."""
        done = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(done,), daemon=True, name="rft-board")
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join(2 * TELL_S)

    def _keep(self, done: threading.Event) -> None:
        try:
            while True:
                self.tell()
                self._look()
                if done.wait(TELL_S):
                    return
        except dist.DistError:
            # A rank that keeps the store itself, without torchrun, may just have come to its end.
            if under_torchrun():
                self._here.given_up("the store where the ranks meet is gone, and with it torchrun on the first node")

    def _look(self) -> None:
        if self.store.check([self._key("given up")]):
            self._here.given_up(self.store.get(self._key("given up")).decode())
        key = self._key(self._neighbour)
        heard, now = self.store.get(key) if self.store.check([key]) else b"", time.monotonic()
        if heard != self._heard:
            self._heard, self._heard_at = heard, now
        elif now - self._heard_at > self._silence and not self.store.check([f"{key} is done"]):
            self.give_up(f"nothing was heard of rank {self._neighbour} for {self._silence:g} s, not even what it is doing")

    def _key(self, who: int | str) -> str:
        return f"{self._name}/board/{who}"


def _runs(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def told(words: str, step: str, word: Word | None) -> str:
    """Where a rank is, with what it does there, unless it has gone on since it said so, and which process it is."""
    said: list[Any] = [words.format(step)]
    if word is not None:
        said += [word.what()] if word.step == step else []
        said.append(word.process())
    return "; ".join(said)

"""The engine of a TP group, as one rank of the group sees it: the first rank has the process, every rank a link to its own TP rank.

All ranks call the same in the same order. What the process is asked for by the first rank alone is told to the others, failures too.
"""

import contextlib
import functools
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from rft.engines import sglang_process
from rft.engines.sglang_bucket import Bucket, Entry
from rft.errors import EngineFailed, RftError, SyncFailed
from rft.parallel.messages import gathered
from rft.parallel.world import World

log = logging.getLogger("rft")
T = TypeVar("T")
LINK_S = 60.0
"""For a TP rank to connect, after the engine has said that it is ready."""


class Group:
    """See the module's head. `settings` makes the process's settings from the addresses of all ranks' links."""

    def __init__(self, world: World, settings: Callable[[list[str]], Mapping[str, Any]], *, timeout_s: float) -> None:
        self._world, self._settings, self._timeout_s = world, settings, timeout_s
        self._process: sglang_process.Process | None = None
        self._link: connection.Connection[Any, Any] | None = None
        self._busy = False

    @property
    def running(self) -> bool:
        """Whether it has been started, and was not ended since."""
        return self._link is not None

    @property
    def pid(self) -> int | None:
        """Of the engine's process, on the rank that owns it."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the engine. Raises on every rank what stands against it; nothing is left then."""
        folder = Path(tempfile.mkdtemp(prefix="rft-link-"))  # for this user alone: whoever can reach the socket may connect
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(str(folder / "rank"))
                door.listen(sglang_process.ATTEMPTS)
                door.settimeout(LINK_S)
                settings = self._settings(self._gathered(str(folder / "rank")))
                self._link = _met(door, self._shared(lambda: self._started(settings)))
        except TimeoutError as error:
            self.end()
            raise EngineFailed(f"a TP rank of SGLang did not connect with its rank within {LINK_S:g} s") from error
        except BaseException:
            self.end()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _started(self, settings: Mapping[str, Any]) -> int:
        self._process = sglang_process.start(settings, timeout_s=self._timeout_s)
        return self._process.pid

    def call(self, verb: str, *arguments: Any) -> Any:
        """What the engine gives; all ranks get it."""
        return self._shared(lambda: self._own_process.call(verb, *arguments))

    def ask(self, *message: Any) -> Any:
        """What this rank's TP rank says to a message; each rank sends its own."""
        with self._exchange():
            self._send(message)
            self._begin("serve")
            try:
                told = self._told()
            except EngineFailed:
                self._busy = False
                raise
            self._busy = False
        return told

    def load(self, tensors: Iterator[tuple[str, Tensor]], version: str, bucket: Bucket) -> Mapping[str, int]:
        """Sends this rank's TP rank a whole set of weights. Returns the checksums of what it received, as far as it holds it.

        Raises `SyncFailed` where something else arrived than was sent.
        """
        with self._exchange():
            try:
                self._send(("load", str(bucket.dtype).removeprefix("torch.")))
                bucket.offer(self._own_link)
                self._begin("load", version)
                accepted = functools.cache(self._told)  # the first part is written meanwhile

                def hand_over(entries: list[Entry]) -> None:
                    _ = accepted()
                    self._send(("part", entries))

                sent = bucket.pack(tensors, hand_over, self._told)
                _ = accepted()
                self._send(("end",))
                arrived, received = self._told()
                self._busy = False
            except BaseException:
                self._stop()
                raise
        if wrong := [name for name, value in sent.items() if arrived.get(name) != value]:
            raise SyncFailed(f"SGLang did not get what it was sent: {', '.join(wrong[:3])} and {len(wrong)} tensors in all differ")
        return received

    def settle(self) -> bool:
        """Ends what is under way. Gives whether the engine is there and well, on all ranks; where it is not, its processes are ended."""
        healthy = self.running and not self._busy
        if healthy:
            try:
                if self._process is not None:
                    self._process.give_up()
                healthy = not self._own_link.poll(0)  # nobody has anything to say now, so it would be the end of the link
            except (EngineFailed, OSError):
                healthy = False
        if all(self._gathered(healthy)):
            return True
        self.end()
        return False

    def end(self) -> None:
        """Ends the engine with its processes. Idempotent."""
        if self._process is not None:
            self._process.end()
        if self._link is not None:
            self._link.close()
        self._process, self._link, self._busy = None, None, False

    # ---- between ranks ----

    def _gathered(self, own: T) -> list[T]:
        """Of all ranks of the TP group, in their order."""
        return gathered(own, self._world.tp, self._world.tp_size)

    def _shared(self, function: Callable[[], T]) -> T:
        """What a function gives on the first rank, on all of them; and so with its failure."""
        given, failure = None, None
        if self._world.tp_rank == 0:
            try:
                given = function()
            except RftError as error:
                failure = error
        told: list[Any] = [(given, failure)]
        if self._world.tp_size > 1:
            dist.broadcast_object_list(told, src=self._world.rank - self._world.tp_rank, group=self._world.tp)
        given, failure = told[0]
        if failure is not None:
            raise failure
        return given

    # ---- the link ----

    @contextlib.contextmanager
    def _exchange(self) -> Generator[None]:
        """An exchange over the link, which is over when the process has answered, too.

        One that is left in the middle leaves both sides out of step: `settle` ends the engine then.
        """
        self._busy = True
        try:
            yield
        except BaseException:
            if not self._busy:
                with contextlib.suppress(EngineFailed):
                    self._answered()
            raise
        self._answered()

    def _begin(self, verb: str, *arguments: Any) -> None:
        if self._process is not None:
            self._process.begin(verb, *arguments)

    def _answered(self) -> None:
        if self._process is not None:
            self._process.answer()

    def _send(self, message: Any) -> None:
        try:
            self._own_link.send(message)
        except OSError as error:
            raise self._death() from error

    def _told(self) -> Any:
        """The next message of the TP rank. Raises `EngineFailed` for a failure there, for its death, and for the process's."""
        kind, told = self._received()
        if kind == "failed":
            raise EngineFailed(f"SGLang failed: {told}; recover(state) leads on")
        return told

    def _received(self) -> tuple[str, Any]:
        link, process = self._own_link, self._process
        ready = connection.wait([link] if process is None else [link, process.connection])
        if link not in ready:  # what the process was asked for has ended, and nobody has spoken to the TP rank
            assert process is not None
            try:
                process.answer()
            finally:
                self.end()
            raise EngineFailed("SGLang did not pass on what it was asked for; after recover(state) a broadcast starts it anew")
        try:
            return link.recv()
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _stop(self) -> None:
        """Has the TP rank leave what it is doing, so that both sides are in step again."""
        if self.running:
            self._send(("stop",))
            while self._received()[0] != "stopped":
                continue
            self._busy = False

    def _death(self) -> EngineFailed:
        """Ends what is left of the engine, and tells what has become of it."""
        if self._process is None:
            error = EngineFailed(
                "SGLang is dead; the first rank of this TP group has the end of its output. after recover(state) a broadcast starts it anew"
            )
        else:
            error = self._process.death()
        self.end()
        return error

    @property
    def _own_link(self) -> "connection.Connection[Any, Any]":
        if self._link is None:
            raise EngineFailed("SGLang has been ended; recover(state) leads on")
        return self._link

    @property
    def _own_process(self) -> sglang_process.Process:
        if self._process is None:
            raise EngineFailed("SGLang has been ended; recover(state) leads on")
        return self._process


def _met(door: socket.socket, pid: int) -> "connection.Connection[Any, Any]":
    """The TP rank of the engine whose process that is; those of a start that failed may have knocked before."""
    while True:
        link = connection.Connection(door.accept()[0].detach())
        with contextlib.suppress(EOFError, OSError):
            if link.poll(LINK_S) and link.recv() == pid:
                return link
        link.close()

"""SGLang's process, as the rank that started it sees it: started, asked, found dead, ended with everything that it started itself.

SGLang changes the process that it is started from: signal handlers that end all of it, the start method of multiprocessing, limits,
environment, event loop. So it gets one of its own, apart from the trainer's, whose death is an error here and nothing more.
"""

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

from rft.errors import BadInput, EngineFailed, MissingEngine

log = logging.getLogger("rft")
HOST = Path(__file__).with_name("sglang_host.py")
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use|port.* is not available", re.IGNORECASE)
ATTEMPTS = 3
"""Starts with other ports, where one that was free has been taken meanwhile."""
NOISE = re.compile(r"py-?spy|coredump", re.IGNORECASE)
"""What SGLang says of its own diagnosis, when one of its processes has died."""
PATIENCE_S = 30.0
"""For what answers at once, if it answers at all: ending, and giving up what it is doing."""
TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|GROUP_WORLD_SIZE|ROLE_NAME|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING"
)
"""What torchrun tells its ranks: SGLang's own processes would take it for theirs."""


class Process:
    """A process of SGLang's, ready for calls. Whatever it is asked, its death raises `EngineFailed` with the end of its output."""

    def __init__(self, settings: Mapping[str, Any], *, timeout_s: float) -> None:
        """Starts it. Raises `MissingEngine`, `BadInput` or `EngineFailed`; nothing is left of it then."""
        self._folder = Path(tempfile.mkdtemp(prefix="rft-sglang-"))
        ours, theirs = socket.socketpair()
        self._connection = connection.Connection(ours.detach())
        self._log = (self._folder / "log").open("w+b")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(HOST), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_environment(self._folder, settings),
                start_new_session=True,  # a process group of its own, so that all of it can be ended at once; and no Ctrl-C for it
            )
        self._calls, self._waiting, self._started = 0, False, False
        try:
            self._send(("settings", dict(settings)))
            self.ready: Mapping[str, Any] = self._told(timeout_s)
            self._started = True
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """Of the process that was started, which is the head of a group of its own."""
        return self._process.pid

    @property
    def connection(self) -> "connection.Connection[Any, Any]":
        """To be waited for beside others: readable when an answer is there, or when the process is dead."""
        return self._connection

    def call(self, verb: str, *arguments: Any) -> Any:
        """Asks for something, and waits for the answer as long as the process lives."""
        self.begin(verb, *arguments)
        return self.answer()

    def begin(self, verb: str, *arguments: Any) -> None:
        """Asks for something; `answer` is to follow."""
        self._calls += 1
        self._waiting = True
        self._send((verb, self._calls, arguments))

    def answer(self) -> Any:
        """The answer to what was asked last; those of calls that were given up are passed by."""
        told = self._told(None)
        self._waiting = False
        return told

    def give_up(self) -> None:
        """Ends what was asked and never waited for: its requests are aborted, and its answer is passed by."""
        if self._waiting:
            self._send(("abort", self._calls, ()))
            _ = self._told(PATIENCE_S)
            self._waiting = False

    def end(self) -> None:
        """Ends the process with all that it started. Idempotent."""
        if self._process.poll() is None or self._folder.exists():
            with self._log:
                _kill_group(self._process)
            self._connection.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- messages ----

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self.death() from error

    def _told(self, timeout_s: float | None) -> Any:
        """The answer to the last call. Raises what the process says, or `EngineFailed` for its death or a time that passes."""
        deadline = time.monotonic() + (timeout_s or 0)
        while True:
            if timeout_s is not None and not self._connection.poll(max(deadline - time.monotonic(), 0)):
                raise self._late(timeout_s)
            try:
                call, kind, told = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self.death() from error
            if call == self._calls:
                break
        if kind == "ok":
            return told
        raise {"missing": MissingEngine, "bad": BadInput}.get(kind, EngineFailed)(told if kind != "start" else f"{told}\n{self._tail()}")

    def death(self) -> EngineFailed:
        """The error for a process that is dead, or about to be."""
        try:
            how = f"exit status {self._process.wait(PATIENCE_S)}"
        except subprocess.TimeoutExpired:
            how = "it closed its connection"
        if not self._started:
            return EngineFailed(f"SGLang ended as it started ({how}); the end of its output says what to change:\n{self._tail()}")
        return EngineFailed(
            f"SGLang's process is dead ({how}); after recover(state) a broadcast starts it anew. The end of its output:\n{self._tail()}"
        )

    def _late(self, seconds: float) -> EngineFailed:
        if self._started:
            advice = f"SGLang did not answer within {seconds:g} s; recover(state) leads on"
        else:
            advice = (
                f"SGLang has not started within start_timeout_s={seconds:g}; unless it says below what is wrong, give SGLangEngine longer"
            )
        return EngineFailed(f"{advice}. The end of its output:\n{self._tail()}")

    def _tail(self, size: int = 8000) -> str:
        _ = self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - size))
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if line and not NOISE.search(line)) or "(it has said nothing)"


def start(settings: Mapping[str, Any], *, timeout_s: float) -> Process:
    """SGLang's process, on a port that nobody has; where another takes it meanwhile, on another one. Raises as `Process` does."""
    for attempt in range(1, ATTEMPTS + 1):
        port = free_port()
        try:
            return Process({**settings, "port": port}, timeout_s=timeout_s)
        except EngineFailed as error:
            if attempt == ATTEMPTS or not PORT_TAKEN.search(str(error)):
                raise
            log.warning("port %d, which SGLang was given, has been taken meanwhile; it is started with another one", port)
    raise AssertionError("the last attempt returns or raises")


def free_port() -> int:
    """A port below those that the system gives to connections of its own accord: less likely to be taken in the time until it is used."""
    for _ in range(100):
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise EngineFailed("no port between 20000 and 30000 is free for SGLang")


def _environment(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """This process's, without what torchrun says of its ranks, and with the library first on the path."""
    kept = {name: value for name, value in os.environ.items() if not TORCHRUN.fullmatch(name)}
    paths = [str(Path(__file__).parents[2]), *filter(None, [kept.get("PYTHONPATH")])]
    kept |= {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
    return kept | settings["environment"]


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):  # all of the group has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    _ = process.wait()

"""The process that SGLang's engine runs in, started and asked by `sglang_process`: `python -P sglang_host.py FD`.

SGLang's own processes, which it spawns from here, run this file first. So it takes from the library what it needs and no more, and what
has to be set right before SGLang is imported is done at its head.
"""

import logging
import os
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import active_children, connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

POLL_S = 0.5
"""Between two looks at whether the rank is still there."""
log = logging.getLogger("rft")


def set_up() -> None:
    """The library, without what its root imports, which is several seconds of every process; and SGLang's surroundings."""
    if "rft" not in sys.modules:
        library = ModuleType("rft")
        library.__path__ = [str(Path(__file__).parents[1])]
        sys.modules["rft"] = library
    from rft.engines.sglang_setup import prepare

    prepare()


set_up()


class Host:
    """Takes calls one after the other. A thread reads them, so that one that is under way can be aborted, and the rank's death is seen."""

    def __init__(self, link: "connection.Connection[Any, Any]") -> None:
        self._link, self._parent = link, os.getppid()
        self._calls: queue.Queue[tuple[str, int, tuple[Any, ...]]] = queue.Queue()
        _, self._settings = link.recv()
        self._engine: Any = None
        threading.Thread(target=self._read, daemon=True).start()

    def run(self) -> None:
        """Starts the engine, and answers until the rank closes the connection or dies."""
        from rft.engines import sglang_calls

        kind, told = _outcome(partial(self._start, sglang_calls.start))
        self._link.send((0, "start" if kind == "failed" else kind, told))
        while True:
            verb, call, arguments = self._calls.get()
            kind, told = _outcome(partial(getattr(sglang_calls, verb), self._engine, *arguments))
            self._link.send((call, kind, told))

    def _start(self, start: Callable[[Mapping[str, Any]], tuple[Any, Mapping[str, Any]]]) -> Mapping[str, Any]:
        self._engine, ready = start(self._settings)
        threading.Thread(target=_end_with_any, args=[active_children()], daemon=True).start()
        return ready

    def _read(self) -> None:
        """Everything ends with the rank: at the end of the connection, and where a child of its holds that open, at its death."""
        while os.getppid() == self._parent:
            try:
                if not self._link.poll(POLL_S):
                    continue
                message = self._link.recv()
            except (EOFError, OSError):
                break
            if message[0] == "abort":
                engine = self._engine
                engine.loop.call_soon_threadsafe(lambda engine=engine: engine.tokenizer_manager.abort_request(abort_all=True))
            else:
                self._calls.put(message)
        for folder in (os.environ["TMPDIR"], *(Path(address).parent for address in self._settings["addresses"])):
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _end_with_any(workers: Sequence[BaseProcess]) -> None:
    """Ends everything when one of SGLang's processes dies, so that the rank sees the end of its connection.

    SGLang tells its event loop by a signal, and that loop runs during calls alone: a signal that comes between two of them is lost.
    """
    dead = connection.wait([worker.sentinel for worker in workers])
    for worker in workers:
        if worker.sentinel in dead:
            worker.join(POLL_S)
            log.error("SGLang's process %d has died, with the exit code %s", worker.pid, worker.exitcode)
    os.killpg(0, signal.SIGKILL)


def _outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """What a call gives; or how it failed, in words."""
    from rft.engines.sglang_setup import Unfit

    try:
        return "ok", call()
    except Unfit as error:
        return error.kind, str(error)
    except Exception as error:
        log.exception("a call failed")
        return "failed", f"SGLang failed: {type(error).__name__}: {error}"


if __name__ == "__main__":
    logging.basicConfig()
    Host(connection.Connection(int(sys.argv[1]))).run()

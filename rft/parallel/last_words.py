"""A rank that is ended by a signal prints where all ranks were, even while it waits inside a collective.

torchrun ends the survivors of a failure by SIGTERM. Python runs a signal handler only between two bytecodes, and a rank that hangs
in a collective never gets there; so a thread of its own listens to the signal's wake-up pipe.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator


@contextlib.contextmanager
def last_words(words: Callable[[], str]) -> Generator[None]:
    """While it is open, SIGTERM prints `words()` to stderr and ends the process at once with status 143. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listening, waking = socket.socketpair()
    waking.setblocking(False)
    before = signal.signal(signal.SIGTERM, _ignore)
    pipe_before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(listening, words), daemon=True, name="rft-last-words")
    listener.start()
    try:
        yield
    finally:
        _ = signal.set_wakeup_fd(pipe_before)
        _ = signal.signal(signal.SIGTERM, before)
        waking.close()
        listener.join()  # it holds process groups by `words`; letting them go while Python shuts down would abort


def _ignore(signum: int, frame: object) -> None:
    """The listening thread acts; a handler has to be there for the wake-up pipe to be written to."""


def _listen(listening: socket.socket, words: Callable[[], str]) -> None:
    with listening:
        while received := listening.recv(64):
            if signal.SIGTERM in received:
                print(f"ended by SIGTERM; where the ranks were:\n{_spoken(words)}", file=sys.stderr, flush=True)
                os._exit(128 + signal.SIGTERM)


def _spoken(words: Callable[[], str]) -> str:
    try:
        return words()
    except Exception as error:  # noqa: BLE001 (the process is to end now, with or without its table)
        return f"  not known: {error!r}"

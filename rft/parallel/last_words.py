"""A rank that is ended by a signal prints where all ranks were, even while it waits inside a collective.

torchrun ends the survivors of a failure by SIGTERM, and passes Ctrl-C on as SIGINT. Python runs a signal handler only between two
bytecodes, and a rank that hangs in a collective never gets there; so a thread of its own listens to the signals' wake-up pipe.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from types import FrameType

Handler = Callable[[int, FrameType | None], object]
GRACE_S = 8.0
"""How long a rank may go on inside one call, such as a backward pass, after Ctrl-C; one that does not come back waits in vain."""


@contextlib.contextmanager
def last_words(words: Callable[[], str]) -> Generator[None]:
    """While it is open, SIGTERM prints `words()` to stderr and ends the process at once with status 143. Main thread only.

    SIGINT does what it did before, which is to raise `KeyboardInterrupt`; but where it cannot for `GRACE_S`, since the main thread is
    inside a call that waits for other ranks, it ends the process in the same way, with status 130.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listening, waking = socket.socketpair()
    waking.setblocking(False)
    heard, terminating, interrupting = threading.Event(), signal.signal(signal.SIGTERM, _ignore), signal.getsignal(signal.SIGINT)
    if callable(interrupting):
        _ = signal.signal(signal.SIGINT, _hearing(heard, interrupting))
    pipe_before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(listening, words, heard), daemon=True, name="rft-last-words")
    listener.start()
    try:
        yield
    finally:
        _ = signal.set_wakeup_fd(pipe_before)
        _ = signal.signal(signal.SIGTERM, terminating)
        if callable(interrupting):
            _ = signal.signal(signal.SIGINT, interrupting)
        waking.close()
        listener.join()  # it holds process groups by `words`; letting them go while Python shuts down would abort


def _ignore(signum: int, frame: object) -> None:
    """The listening thread acts; a handler has to be there for the wake-up pipe to be written to."""


def _hearing(heard: threading.Event, handler: Handler) -> Handler:
    def hear(signum: int, frame: FrameType | None) -> None:
        heard.set()
        _ = handler(signum, frame)

    return hear


def _listen(listening: socket.socket, words: Callable[[], str], heard: threading.Event) -> None:
    with listening:
        while received := listening.recv(64):
            if signal.SIGTERM in received:
                _end(signal.SIGTERM, words)
            if signal.SIGINT in received and not heard.wait(GRACE_S):
                _end(signal.SIGINT, words)


def _end(by: signal.Signals, words: Callable[[], str]) -> None:
    print(f"ended by {by.name}; where the ranks were:\n{_spoken(words)}", file=sys.stderr, flush=True)
    os._exit(128 + by)


def _spoken(words: Callable[[], str]) -> str:
    try:
        return words()
    except Exception as error:  # noqa: BLE001 (the process is to end now, with or without its table)
        return f"  not known: {error!r}"

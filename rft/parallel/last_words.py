"""A rank that is ended prints where all ranks were, even while it waits inside a collective; and one that is asked tells it, and goes on.

torchrun ends the survivors of a failure by SIGTERM, and passes Ctrl-C on as SIGINT. Python runs a signal handler only between two
bytecodes, and a rank that hangs in a collective never gets there; so a thread of its own listens to the signals' wake-up pipe.

To look into a job that runs, send SIGUSR1 to one of its ranks, or to several:

    kill -USR1 PROCESS        its number stands in the log of `launch`, and in every table of ranks

The rank prints to stderr where all ranks are (step, generation, what it is doing there and for how long, in which line) and the
Python stack of each of its own threads, and goes on undisturbed. Not to torchrun itself, which would end. A handler that was there
before `launch`, such as one for a batch system's warning, is still called, and is alone again afterwards.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from types import FrameType

Handler = Callable[[int, FrameType | None], object]
GRACE_S = 8.0
"""How long a rank may go on inside one call, such as a backward pass, after Ctrl-C; one that does not come back waits in vain."""
LOOK_S = 0.25
"""How often it is asked whether the process must end."""
WORDS_S = 2.0
"""How long the words may take: what they are read from may be gone."""
NAME = "rft-last-words"


def never() -> str | None:
    """Nothing but a signal ends the process."""


def silently(why: str) -> None:
    """Nobody else is to know."""


@contextlib.contextmanager
def last_words(
    words: Callable[[], str], overdue: Callable[[], str | None] = never, parting: Callable[[str], None] = silently
) -> Generator[None]:
    """While it is open, SIGTERM prints `words()` to stderr and ends the process at once, with status 143.

    SIGUSR1 prints them too, with this process's stacks, and ends nothing.

    SIGINT does what it did before, which is to raise `KeyboardInterrupt`; but where it cannot for `GRACE_S`, since the main thread is
    inside a call that waits for other ranks, it ends the process in the same way, with status 130. When `overdue` gives a reason, the
    process ends with status 1, the reason and the words. `parting` is given the reason before the process ends. Outside the main
    thread, where Python allows no handlers, signals are left alone.
    """
    listening, waking = socket.socketpair()
    waking.setblocking(False)
    listening.settimeout(LOOK_S)
    heard = threading.Event()
    listener = threading.Thread(target=_listen, args=(listening, words, overdue, parting, heard), daemon=True, name=NAME)
    listener.start()
    main = threading.current_thread() is threading.main_thread()
    try:
        with _handlers(waking.fileno(), heard) if main else contextlib.nullcontext():
            yield
    finally:
        waking.close()
        listener.join()  # it holds process groups by `words`; letting them go while Python shuts down would abort


@contextlib.contextmanager
def _handlers(pipe: int, heard: threading.Event) -> Generator[None]:
    before = {which: signal.getsignal(which) for which in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    interrupting, asking = before[signal.SIGINT], before[signal.SIGUSR1]
    _ = signal.signal(signal.SIGTERM, _ignore)
    _ = signal.signal(signal.SIGUSR1, asking if callable(asking) else _ignore)
    if callable(interrupting):
        _ = signal.signal(signal.SIGINT, _hearing(heard, interrupting))
    pipe_before = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    try:
        yield
    finally:
        _ = signal.set_wakeup_fd(pipe_before)
        for which, handler in before.items():
            if handler is not None:  # one that C code installed, which Python can neither call nor put back
                _ = signal.signal(which, handler)


def _ignore(signum: int, frame: object) -> None:
    """The listening thread acts; a handler has to be there for the wake-up pipe to be written to."""


def _hearing(heard: threading.Event, handler: Handler) -> Handler:
    def hear(signum: int, frame: FrameType | None) -> None:
        heard.set()
        _ = handler(signum, frame)

    return hear


def _listen(
    listening: socket.socket,
    words: Callable[[], str],
    overdue: Callable[[], str | None],
    parting: Callable[[str], None],
    heard: threading.Event,
) -> None:
    def end(what: str, status: int) -> None:
        say(f"{what}; where the ranks were:\n{_spoken(words)}")
        _ = _spoken(lambda: str(parting(what)))
        os._exit(status)

    with listening:
        while received := _received(listening):
            if signal.SIGTERM in received:
                end("ended by SIGTERM", 128 + signal.SIGTERM)
            if signal.SIGINT in received and not heard.wait(GRACE_S):
                end("ended by SIGINT", 128 + signal.SIGINT)
            if signal.SIGUSR1 in received:
                say(f"asked by SIGUSR1 where the ranks are:\n{_spoken(words)}\n{_stacks()}")
            if (why := overdue()) is not None:
                end(f"ended, since {why}", 1)


def _received(listening: socket.socket) -> bytes:
    """The numbers of the signals that came, or 0 if none did in time; nothing once the other end is closed."""
    try:
        return listening.recv(64)
    except TimeoutError:
        return b"\0"


def say(text: str) -> None:
    """To stderr in one piece, so that the ranks' lines do not mix."""
    _ = sys.stderr.write(text + "\n")
    _ = sys.stderr.flush()


def _spoken(words: Callable[[], str]) -> str:
    said = ["  not known: there was no answer"]
    speaker = threading.Thread(target=_speak, args=(words, said), daemon=True, name=NAME)
    speaker.start()
    speaker.join(WORDS_S)
    return said[-1]


def _speak(words: Callable[[], str], said: list[str]) -> None:
    try:
        said.append(words())
    except Exception as error:  # noqa: BLE001 (the process is to go on, or to end, with or without its table)
        said.append(f"  not known: {error!r}")


def _stacks() -> str:
    """The Python stack of every thread but those of this module, innermost call last."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] (documented as public)
    threads = [t for t in threading.enumerate() if t.ident in frames and t.name != NAME]
    return "\n".join(f"thread {t.name}:\n" + "".join(traceback.format_stack(frames[t.ident])).rstrip() for t in threads if t.ident)

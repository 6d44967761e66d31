import signal
import subprocess
import sys
import threading
import time

from rft.parallel.last_words import last_words
from tests.launching import ROOT

WAITING = """
import sys, threading
from rft.parallel.last_words import last_words

def words():
    {words}

{before}
with last_words(words):
    print("ready", flush=True)
    {waiting}
"""


# A mutex that is locked twice is waited for in C, and no signal interrupts that: no bytecode runs, and so no handler.
BEFORE_C = "import ctypes; c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64); _ = c.pthread_mutex_lock(mutex)"
IN_C = "c.pthread_mutex_lock(mutex)"


def ended(
    by: signal.Signals = signal.SIGTERM,
    *,
    words: str = "return 'rank 0: here'",
    before: str = "",
    waiting: str = "threading.Event().wait(60)",
) -> tuple[int, str]:
    """The exit status and stderr of a process that gets a signal while it waits."""
    script = WAITING.format(words=words, before=before, waiting=waiting)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(by)
        _, errors = process.communicate(timeout=30)
    return process.returncode, errors


def test_sigterm_prints_the_words_and_ends_at_once() -> None:
    status, errors = ended()
    assert status == 128 + signal.SIGTERM
    assert errors == "ended by SIGTERM; where the ranks were:\nrank 0: here\n"


def test_while_the_process_is_in_c_too() -> None:
    status, errors = ended(before=BEFORE_C, waiting=IN_C)
    assert status == 128 + signal.SIGTERM
    assert "rank 0: here" in errors


def test_sigint_interrupts_what_it_can() -> None:
    status, errors = ended(signal.SIGINT)
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert "rank 0: here" not in errors


def test_sigint_ends_what_it_cannot_interrupt() -> None:
    status, errors = ended(
        signal.SIGINT, before=f"import rft.parallel.last_words as module; module.GRACE_S = 0.2; {BEFORE_C}", waiting=IN_C
    )
    assert status == 128 + signal.SIGINT
    assert errors == "ended by SIGINT; where the ranks were:\nrank 0: here\n"


def test_words_that_fail_do_not_keep_the_process() -> None:
    status, errors = ended(words="raise ValueError('no words')")
    assert status == 128 + signal.SIGTERM
    assert "no words" in errors


def test_what_was_there_before_is_there_again() -> None:
    all_three = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    handlers = [signal.getsignal(which) for which in all_three]
    threads = threading.active_count()
    with last_words(str):
        assert all(signal.getsignal(which) is not handler for which, handler in zip(all_three, handlers, strict=True))
    assert [signal.getsignal(which) for which in all_three] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    deadline = time.monotonic() + 5
    while threading.active_count() > threads:
        assert time.monotonic() < deadline, "the listening thread did not end"
        time.sleep(0.01)


def test_outside_the_main_thread_nothing_is_done() -> None:
    seen = list[object]()

    def inside() -> None:
        with last_words(str):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]

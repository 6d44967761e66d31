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

with last_words(words):
    print("ready", flush=True)
    {waiting}
"""


def ended(*, words: str = "return 'rank 0: here'", waiting: str = "threading.Event().wait(60)") -> tuple[int, str]:
    """The exit status and stderr of a process that is ended by SIGTERM while it waits."""
    script = WAITING.format(words=words, waiting=waiting)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    return process.returncode, errors


def test_sigterm_prints_the_words_and_ends_at_once() -> None:
    status, errors = ended()
    assert status == 128 + signal.SIGTERM
    assert errors == "ended by SIGTERM; where the ranks were:\nrank 0: here\n"


def test_while_the_process_is_in_c_too() -> None:
    # A mutex that is locked twice is waited for in C, and no signal interrupts that: no bytecode runs, and so no handler.
    lock = "import ctypes; c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64); [c.pthread_mutex_lock(mutex) for _ in range(2)]"
    status, errors = ended(waiting=lock)
    assert status == 128 + signal.SIGTERM
    assert "rank 0: here" in errors


def test_words_that_fail_do_not_keep_the_process() -> None:
    status, errors = ended(words="raise ValueError('no words')")
    assert status == 128 + signal.SIGTERM
    assert "no words" in errors


def test_what_was_there_before_is_there_again() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    threads = threading.active_count()
    with last_words(str):
        assert signal.getsignal(signal.SIGTERM) is not handler
    assert signal.getsignal(signal.SIGTERM) is handler
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

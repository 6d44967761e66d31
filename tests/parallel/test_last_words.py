import signal
import subprocess
import sys
import threading
import time

import pytest

from rft.parallel.last_words import last_words
from tests.launching import ROOT

PARALLEL = ROOT / "rft" / "parallel"
"""Where the scripts below find the module without the rest of the library, which takes longer to import than they run."""
WAITING = """
import sys, threading
from last_words import last_words

def words():
    {words}

{before}
with last_words(words):
    threading.Timer(0.2, print, ["ready"], {{"flush": True}}).start()  # while the main thread waits already
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
    waiting: str = "threading.Event().wait(300)",
) -> tuple[int, str]:
    """The exit status and stderr of a process that gets a signal while it waits."""
    script = WAITING.format(words=words, before=before, waiting=waiting)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PARALLEL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(by)
        _, errors = process.communicate(timeout=60)
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
    status, errors = ended(signal.SIGINT, before=f"import last_words as module; module.GRACE_S = 0.2; {BEFORE_C}", waiting=IN_C)
    assert status == 128 + signal.SIGINT
    assert errors == "ended by SIGINT; where the ranks were:\nrank 0: here\n"


def test_words_that_fail_do_not_keep_the_process() -> None:
    status, errors = ended(words="raise ValueError('no words')")
    assert status == 128 + signal.SIGTERM
    assert "no words" in errors


ASKED = """
import signal, threading, time
from last_words import last_words

def before(signum, frame):
    print("the handler that was there before", flush=True)

{before}
with last_words(lambda: "rank 0: here"):
    print("ready", flush=True)
    {waiting}
print("went on", flush=True)
assert signal.getsignal(signal.SIGUSR1) is {then}
"""


@pytest.mark.parametrize("earlier", [True, False])
def test_sigusr1_prints_words_and_stacks_and_the_run_goes_on(earlier: bool) -> None:
    script = ASKED.format(
        before="signal.signal(signal.SIGUSR1, before)" if earlier else "",
        waiting="ended = time.monotonic() + 2\n    while time.monotonic() < ended: time.sleep(0.01)",
        then="before" if earlier else "signal.SIG_DFL",
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PARALLEL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.count("asked by SIGUSR1 where the ranks are:\nrank 0: here\nthread MainThread:\n  File") == 2
    assert "rft-last-words" not in errors
    assert said == "the handler that was there before\n" * 2 * earlier + "went on\n"


def test_sigusr1_is_answered_while_the_process_is_in_c() -> None:
    script = WAITING.format(words="return 'rank 0: here'", before=BEFORE_C, waiting=IN_C)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PARALLEL
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        said = [process.stderr.readline() for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert said == ["asked by SIGUSR1 where the ranks are:\n", "rank 0: here\n", "thread MainThread:\n"]


def test_what_is_overdue_ends_with_the_reason() -> None:
    script = "import threading\nfrom last_words import last_words\n"
    script += "with last_words(lambda: 'rank 0: here', lambda: 'it hung'): threading.Event().wait(300)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=PARALLEL, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "ended, since it hung; where the ranks were:\nrank 0: here\n")


def test_words_that_take_too_long_are_not_waited_for() -> None:
    status, errors = ended(words="import time; time.sleep(60)")
    assert status == 128 + signal.SIGTERM
    assert errors == "ended by SIGTERM; where the ranks were:\n  not known: there was no answer\n"


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

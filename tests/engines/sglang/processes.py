"""What the tests see of SGLang's processes."""

import re
import time
from collections.abc import Sequence
from pathlib import Path

import psutil


def family(pid: int | None) -> list[psutil.Process]:
    """SGLang's process and all that it started."""
    head = psutil.Process(pid)
    return [head, *head.children(recursive=True)]


def all_gone(processes: Sequence[psutil.Process], seconds: float = 20) -> bool:
    """Whether they end in time. One that is dead, and that nobody has looked after yet, holds nothing any more."""
    deadline = time.monotonic() + seconds
    while any(map(_lives, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def shared_files(processes: Sequence[psutil.Process]) -> set[Path]:
    """SGLang's own in shared memory that the processes have mapped, by the names that they were made with."""
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes]
    return {Path(path) for path in re.findall(r"/dev/shm/sgl\S+", "".join(maps))}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

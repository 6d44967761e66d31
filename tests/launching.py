"""Starts a script under torchrun, as a user would, and leaves no process behind."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


def torchrun(script: Path | str, *args: object, ranks: int = 2, timeout: float = 120, env: dict[str, str] | None = None) -> str:
    """Runs `script` with `args` on `ranks` processes and returns what they printed, stdout and stderr together.

    Raises AssertionError with the output's tail where a rank fails, or where `timeout` seconds pass; every process is gone then.
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    with subprocess.Popen(
        [sys.executable, *launcher, str(script), *map(str, args)],
        env={**os.environ, **_environment(), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill_tree(process.pid)
            output, _ = process.communicate()
            raise AssertionError(f"{script} did not end in {timeout} s:\n{_tail(output)}") from None
        except BaseException:
            _kill_tree(process.pid)
            raise
    assert process.returncode == 0, f"{script} ended with {process.returncode}:\n{_tail(output)}"
    return output


def _environment() -> dict[str, str]:
    """One thread a rank (two ranks on two cores), and the repository before anything installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths)}


def _kill_tree(pid: int) -> None:
    # torchrun gives every rank a session of its own, so that killing its process group would leave the ranks.
    processes = [process := psutil.Process(pid), *process.children(recursive=True)]
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _tail(output: str) -> str:
    return output[-6000:]

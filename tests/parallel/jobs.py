"""Starts jobs that are to fail, and sees how long they took to, what they said, and whether they left a process behind."""

import contextlib
import dataclasses as dc
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Literal

import psutil

from tests.launching import ROOT

MARK = "RFT_TEST_JOB"
STANDALONE = ("--standalone",)
Form = Literal["c10d", "static"]


def two_nodes(form: Form) -> list[tuple[str, ...]]:
    """The options of two torchruns, as on two nodes, in either of the ways in which they find each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    if form == "c10d":
        return [("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a-job")] * 2
    return [("--nnodes", "2", "--node-rank", str(n), "--master-addr", "127.0.0.1", "--master-port", port) for n in range(2)]


@dc.dataclass
class Job:
    """One torchrun per agent, each with its own options."""

    mark: str
    agents: list[subprocess.Popen[str]]
    outputs: list[Path]

    def output(self) -> str:
        """What all have printed until now."""
        return "\n".join(path.read_text() for path in self.outputs)

    def wait(self, timeout: float = 120) -> float:
        """Until every agent has ended and no process is left, which may be a rank whose agent was killed; gives the time of that."""
        deadline = time.monotonic() + timeout
        for agent in self.agents:
            try:
                _ = agent.wait(deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the job did not end in {timeout} s:\n{self.output()}") from None
        while left := self.processes():
            assert time.monotonic() < deadline, f"{left} were left after {timeout} s:\n{self.output()}"
            time.sleep(0.1)
        return time.time()

    def processes(self) -> list[psutil.Process]:
        """Those of the job that run, found by a mark in their environment."""
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and _has(process, self.mark)]

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that run."""
        return {int(p.environ()["RANK"]): p for p in self.processes() if "RANK" in p.environ()}


@contextlib.contextmanager
def job(script: Path, *args: object, folder: Path, ranks: int = 2, agents: Sequence[Sequence[str]] = (STANDALONE,)) -> Generator[Job]:
    """`script` on `ranks` processes for each torchrun; nothing of it is left when this is."""
    mark = secrets.token_hex(8)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT), MARK: mark}
    started = Job(mark, [], [])
    try:
        for number, options in enumerate(agents):
            started.outputs.append(folder / f"output {number}")
            with started.outputs[-1].open("w") as output:
                command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(ranks), str(script)]
                agent = subprocess.Popen([*command, *map(str, args)], env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)
            started.agents.append(agent)
        yield started
    finally:
        for process in started.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for agent in started.agents:
            _ = agent.wait(30)


def wait_until(true: Callable[[], object], *, timeout: float = 90) -> None:
    """Looks ten times a second."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.1)


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False

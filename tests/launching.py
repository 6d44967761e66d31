"""Starts a script on several ranks, as `torchrun --standalone` does, and leaves no process behind.

It is torchrun's own agent that starts and watches the ranks. But instead of two new interpreters, agent and ranks are forks of a
process that has imported what they need. Tests of torchrun's command line itself start it (see `parallel.jobs`).
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""One thread a rank: two ranks on two cores."""
IMPORTED = (
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "rft.engines.transformers",
    "rft.trainers.fsdp2",
)
"""What most scripts import, and what takes longer than many a script. None of it may start a thread or compute."""


def torchrun(
    script: Path | str, *args: object, ranks: int = 2, restarts: int = 0, timeout: float = 120, env: Mapping[str, str] | None = None
) -> str:
    """Runs `script` with `args` on `ranks` processes and returns what they printed, stdout and stderr together.

    All start again, up to `restarts` times, when one fails. A `PYTHONPATH` in `env` comes before what else is imported from. Raises
    AssertionError with the output's tail where a rank fails, or where `timeout` seconds pass; every process is gone then.
    """
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        counts = {"nproc_per_node": ranks, "max_restarts": restarts}
        agent = context.Process(target=_agent, args=(output, dict(env or {}), counts, str(script), [str(arg) for arg in args]))
        agent.start()
        try:
            agent.join(timeout)
            assert agent.exitcode is not None, f"{script} did not end in {timeout} s:\n{_tail(output)}"
        finally:
            _kill_tree(agent.pid)
        assert agent.exitcode == 0, f"{script} ended with {agent.exitcode}:\n{_tail(output)}"
        return output.read_text(errors="replace")


def _agent(output: Path, env: Mapping[str, str], counts: Mapping[str, Any], script: str, args: list[str]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with output.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            _ = stream.flush()
            _ = os.dup2(file.fileno(), stream.fileno())
    os.environ.update(env)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    meeting: dict[str, Any] = {"run_id": str(uuid.uuid4()), "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    config = LaunchConfig(min_nodes=1, max_nodes=1, start_method="fork", **meeting, **counts)
    _ = elastic_launch(config, _rank)(script, args)


def _rank(script: str, args: list[str]) -> None:
    """What `python script args` does."""
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    try:
        _ = runpy.run_path(script, run_name="__main__")
    except Exception:  # noqa: BLE001 (as the interpreter does at the end of a script)
        traceback.print_exc()
        sys.exit(1)


def _kill_tree(pid: int | None) -> None:
    if pid is None or not psutil.pid_exists(pid):
        return
    # Every rank may have a session of its own, so that killing the agent's process group would leave it.
    processes = [process := psutil.Process(pid), *process.children(recursive=True)]
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _tail(output: Path) -> str:
    return output.read_text(errors="replace")[-6000:]

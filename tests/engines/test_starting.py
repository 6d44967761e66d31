"""How SGLang's process is started where SGLang is too old or its port is taken; SGLang itself is not needed for that."""

import dataclasses as dc
from pathlib import Path
from typing import Any

import pytest
import torch

import rft
from rft.engines import sglang_options, sglang_process
from rft.errors import EngineFailed, MissingEngine
from rft.models import find_model
from rft.testing.models import tiny_model
from rft.testing.scripted import alone

RECORD = "import dataclasses\n\n@dataclasses.dataclass\nclass {}:\n    {}: str\n"
OLD = {
    "srt/entrypoints/engine.py": "class Engine:\n    def collective_rpc(self): ...\n",
    "srt/layers/sampler.py": "def register_sampler_backend(): ...\n",
    "srt/managers/io_struct.py": RECORD.format("UpdateWeightsFromTensorReqInput", "load_format"),
    "srt/server_args.py": RECORD.format("ServerArgs", "nccl_port"),
}
"""A package that has of SGLang what an older version had."""
SETTINGS: dict[str, Any] = {"options": {}, "environment": {}, "addresses": []}
TAKEN = "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 20001): address already in use"


def test_one_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in OLD.items():
        file = tmp_path / "sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (file.parent, file.parent.parent, tmp_path / "sglang"):
            (folder / "__init__.py").touch()
        _ = file.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lacks = "run_scheduler_process_func resume_memory_occupation custom_weight_loader cuda_graph_backend_prefill weight_version"
    lacking = ", no ".join(lacks.split())
    with pytest.raises(MissingEngine, match=rf"too old: it has no {lacking}; pip install 'sglang>=0\.5\.17'"):
        _ = sglang_process.start(SETTINGS, timeout_s=120)


@pytest.mark.parametrize(("device", "prompts"), [("cuda:1", "disabled"), ("cpu", None)])
def test_graphs_are_those_that_the_memory_saver_can_let_go(tmp_path: Path, device: str, prompts: str | None) -> None:
    world = dc.replace(alone(), device=torch.device(device))
    given = sglang_options.settings(rft.SGLangEngine(), find_model(str(tiny_model(tmp_path))), world, [])
    options, environment = given["options"], given["environment"]
    assert options.get("cuda_graph_backend_prefill") == prompts
    assert (options["enable_memory_saver"], "SGLANG_MEMORY_SAVER_CUDA_GRAPH" in environment) == (bool(prompts), bool(prompts))
    assert options["base_gpu_id"] == (1 if prompts else 0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[str]]:
    """The ports of processes that were started, and what is still to go wrong with them."""
    ports, failures = list[int](), list[str]()

    def process(settings: Any, *, timeout_s: float) -> str:
        assert timeout_s == 9.0
        ports.append(settings["port"])
        if failures:
            raise EngineFailed(failures.pop())
        return "running"

    monkeypatch.setattr(sglang_process, "Process", process)
    return ports, failures


def test_a_port_that_is_taken_meanwhile_is_exchanged(started: tuple[list[int], list[str]]) -> None:
    ports, failures = started
    failures += [TAKEN]
    assert sglang_process.start(SETTINGS, timeout_s=9.0) == "running"
    assert len(set(ports)) == 2


def test_other_failures_are_told_at_once_and_taken_ports_in_the_end(started: tuple[list[int], list[str]]) -> None:
    ports, failures = started
    failures += ["no such model"]
    with pytest.raises(EngineFailed, match="no such model"):
        _ = sglang_process.start(SETTINGS, timeout_s=9.0)
    failures += [TAKEN] * sglang_process.ATTEMPTS
    with pytest.raises(EngineFailed, match="already in use"):
        _ = sglang_process.start(SETTINGS, timeout_s=9.0)
    assert len(ports) == 1 + sglang_process.ATTEMPTS

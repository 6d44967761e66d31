"""Two torchruns on one host, as on two nodes, do to the bit what one does."""

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rft.testing.models import tiny_model
from tests.parallel.jobs import STANDALONE, Form, Job, job, two_nodes, wait_until

SCRIPT = Path(__file__).with_name("nodes.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class Ran:
    """What a job left, and said on each node."""

    def __init__(self, folder: Path, running: Job, ranks: int) -> None:
        self.ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]
        self.weights = (folder / "model" / "model.safetensors").read_bytes()
        self.nodes = [path.read_text() for path in running.outputs]


def ran(
    folder: Path,
    model: Path,
    *,
    per_node: int,
    agents: Sequence[Sequence[str]] = (STANDALONE,),
    engine: str = "transformers",
    tensor_parallel: int = 1,
    disturb: bool = False,
) -> Ran:
    """The job's results; `disturb`: every rank is asked where it is while it trains."""
    folder.mkdir()
    with job(SCRIPT, model, folder, engine, tensor_parallel, folder=folder, ranks=per_node, agents=agents) as running:
        if disturb:
            # The engine is built, so the handler is there.
            wait_until(lambda: all("engine transformers: weights" in path.read_text() for path in running.outputs), timeout=180)
            for rank in running.ranks().values():
                rank.send_signal(signal.SIGUSR1)
        _ = running.wait(240)
        assert not any(agent.returncode for agent in running.agents), running.output()
        return Ran(folder, running, per_node * len(agents))


def assert_same(one: Ran, other: Ran) -> None:
    assert len(one.ranks) == len(other.ranks)
    for ours, theirs in zip(one.ranks, other.ranks, strict=True):
        assert same(ours, theirs)
    assert one.weights == other.weights


def same(one: Any, other: Any) -> bool:
    """To the bit, tensors in lists in dicts included."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_two_nodes_train_what_one_trains_and_refuse_what_they_cannot(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ran(tmp_path / "one", model, per_node=2)
    monkeypatch.setenv("REFUSALS", "")
    two = ran(tmp_path / "two", model, per_node=1, agents=two_nodes("c10d"), disturb=True)
    assert_same(one, two)
    places = [re.findall(r"rank (\d) of 2: TP rank 0, DP rank (\d), device cpu, process \d+ on \S+", said) for said in two.nodes]
    assert {rank for found in places for rank, _ in found} == {"0", "1"}
    for node, found in zip(two.nodes, places, strict=True):
        assert len(set(found)) == 1, "each node has one rank, whose DP rank is its rank"
        assert found[0][0] == found[0][1]
        assert re.search(r"asked by SIGUSR1 where the ranks are:\n  rank 0: .*\n  rank 1: .*\nthread MainThread:\n", node)
    for rank in range(2):
        told = json.loads((tmp_path / "two" / f"refused{rank}.json").read_text())
        assert told["a TP group over nodes"].startswith("BadInput: this cannot be launched:\nrank 0: tensor_parallel=2 would spread a TP")
        assert "start torchrun with a multiple of 2 per node" in told["a TP group over nodes"]
        assert "not here" in told["a model that one node lacks"]
        assert told["a model that one node lacks"].startswith(
            "BadInput" if rank else "PeerFailed: another rank failed in this step: rank 1"
        )


@pytest.mark.slow
def test_nodes_that_know_each_other_beforehand_too(model: Path, tmp_path: Path) -> None:
    assert_same(ran(tmp_path / "one", model, per_node=2), ran(tmp_path / "two", model, per_node=1, agents=two_nodes("static")))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["c10d", "static"])
def test_two_nodes_of_two_ranks_each(form: Form, model: Path, tmp_path: Path) -> None:
    one = ran(tmp_path / "one", model, per_node=4)
    two = ran(tmp_path / "two", model, per_node=2, agents=two_nodes(form))
    assert_same(one, two)
    nodes = [sorted(set(re.findall(r"rank (\d) of 4: TP rank 0, DP rank (\d)", said))) for said in two.nodes]
    assert sorted(nodes) == [[("0", "0"), ("1", "1")], [("2", "2"), ("3", "3")]]


@pytest.mark.slow
@pytest.mark.vllm
def test_a_tp_group_on_each_node(model: Path, tmp_path: Path) -> None:
    one = ran(tmp_path / "one", model, per_node=4, engine="vllm", tensor_parallel=2)
    two = ran(tmp_path / "two", model, per_node=2, agents=two_nodes("c10d"), engine="vllm", tensor_parallel=2)
    assert_same(one, two)
    nodes = [sorted(set(re.findall(r"rank (\d) of 4: TP rank (\d), DP rank (\d)", said))) for said in two.nodes]
    assert sorted(nodes) == [[("0", "0", "0"), ("1", "1", "0")], [("2", "0", "1"), ("3", "1", "1")]]

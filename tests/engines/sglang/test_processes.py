"""What becomes of SGLang's processes: when one of them dies, when the rank dies, when it does not start; and ports."""

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft.engines import sglang_process
from rft.engines.sglang import build
from rft.errors import EngineFailed
from rft.models import find_model
from rft.parallel.world import World, open_world
from rft.testing.engines import GREEDY, PROMPTS, folder, greedy, module, requests, wake_with, weights
from tests.engines.sglang.processes import all_gone, family
from tests.engines.sglang.test_contract import SPEC

__all__ = ["folder", "module"]


@pytest.fixture(scope="module")
def world() -> World:
    return open_world(1, timeout_s=60)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another process listens on, as far as anybody can tell."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen(1)
        yield other.getsockname()[1]


def kill_worker(started: Sequence[psutil.Process]) -> None:
    next(process for process in started if "sglang::scheduler" in " ".join(process.cmdline())).kill()


def test_a_worker_that_is_killed_while_it_takes_weights_and_one_that_is_idle(folder: Path, module: Any, world: World) -> None:
    engine = build(SPEC, find_model(str(folder)), world)
    wake_with(engine, module)
    first = engine.generate(requests(*PROMPTS), GREEDY)
    started = family(engine._group.pid)

    def stream() -> Iterator[tuple[str, Any]]:
        whole = list(weights(module).items())
        yield from whole[:5]
        kill_worker(started)
        yield from whole[5:]

    with pytest.raises(EngineFailed, match=r"process is dead .*; after recover\(state\) a broadcast starts it anew"):
        _ = engine.load(stream())
    engine.sleep("release")
    assert all_gone(started)
    assert engine.memory().mapped == 0
    wake_with(engine, module)
    assert engine.generate(requests(*PROMPTS), GREEDY) == first
    assert [c.tokens for c in first] == [greedy(module, prompt, 10) for prompt in PROMPTS]
    started = family(engine._group.pid)
    kill_worker(started)
    assert all_gone(started), "nobody has asked them for anything since"
    with pytest.raises(EngineFailed, match=r"process is dead .*; after recover\(state\) a broadcast starts it anew"):
        _ = engine.generate(requests(*PROMPTS), GREEDY)
    with pytest.raises(EngineFailed, match="its weights with them"):
        engine.sleep("keep")
    assert not engine._group.running


@pytest.mark.slow
def test_a_port_that_is_taken_meanwhile(folder: Path, world: World, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free, given = sglang_process.free_port, list[int]()

    def port() -> int:
        given.append(free() if given else taken)
        return given[-1]

    monkeypatch.setattr(sglang_process, "free_port", port)
    build(SPEC, find_model(str(folder)), world).close()
    assert len(given) == 2, "it was started with another port"


def test_an_engine_that_does_not_start_says_why_and_leaves_nothing(folder: Path, world: World) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(EngineFailed, match=r"(?s)ended as it started .*says what to change.*nonsense"):
        _ = build(dataclasses.replace(SPEC, attention="nonsense"), find_model(str(folder)), world)
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_a_start_that_takes_too_long_says_which_option_it_is(folder: Path, world: World) -> None:
    with pytest.raises(EngineFailed, match=r"within start_timeout_s=0\.5; .* give SGLangEngine longer"):
        _ = build(dataclasses.replace(SPEC, start_timeout_s=0.5), find_model(str(folder)), world)


def owner(folder: Path, temporary: Path) -> "subprocess.Popen[str]":
    """A rank of its own, without what this one's world has left in the environment."""
    environment = {name: value for name, value in os.environ.items() if not sglang_process.TORCHRUN.fullmatch(name)}
    environment["TMPDIR"] = str(temporary)
    command = [sys.executable, "-m", "tests.engines.sglang.owner", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_nothing_outlives_the_rank(folder: Path, tmp_path: Path) -> None:
    with owner(folder, tmp_path) as rank:
        assert rank.stdout is not None
        started = family(int(rank.stdout.readline()))
        assert len(started) >= 2
        rank.kill()
        _ = rank.wait(20)
    assert all_gone(started)
    assert not list(tmp_path.glob("rft-*"))


@pytest.mark.slow
def test_nothing_outlives_a_rank_that_is_killed_while_it_starts(folder: Path, tmp_path: Path) -> None:
    with owner(folder, tmp_path) as rank:
        started: list[psutil.Process] = []
        while len(started) < 2:
            time.sleep(0.2)
            assert rank.poll() is None
            started = psutil.Process(rank.pid).children(recursive=True)
        rank.kill()
        _ = rank.wait(20)
    assert all_gone(started)
    assert not list(tmp_path.glob("rft-*"))

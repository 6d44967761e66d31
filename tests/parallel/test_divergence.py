"""One rank of a real job goes astray, and the whole job ends in time, with a report of all ranks, and with no process left."""

import dataclasses as dc
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rft.testing.models import tiny_model
from tests.parallel.jobs import STANDALONE, Form, Job, job, two_nodes, wait_until

SCRIPT = Path(__file__).with_name("diverging.py")
DEADLINE_S = 5.0
QUIET_S = 5.0
"""How long two ranks take to come to their second step on two quick cores that have nothing else to do."""


@dc.dataclass(frozen=True)
class Ended:
    """How a job ended: what it said, the seconds after its rank went astray, and the seconds that the test allows for that."""

    output: str
    seconds: float
    allowed: float

    def in_time(self) -> None:
        assert self.seconds < self.allowed, self.output

    def says(self, *patterns: str) -> None:
        for pattern in patterns:
            assert re.search(pattern, self.output), f"{pattern} is not in\n{self.output}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def astray(
    scene: str,
    who: int,
    *,
    model: Path,
    folder: Path,
    ranks: int = 2,
    agents: Sequence[Sequence[str]] = (STANDALONE,),
    meanwhile: Callable[[Job], None] = lambda _: None,
) -> Ended:
    """Runs the scene of `diverging.py`, to its end."""
    began, noted = time.time(), folder / "astray"
    with job(SCRIPT, model, folder, scene, who, DEADLINE_S, folder=folder, ranks=ranks, agents=agents) as running:
        wait_until(noted.exists, timeout=180)
        event = noted.stat().st_mtime
        meanwhile(running)
        ended = running.wait()
        output = running.output()
        assert all(agent.returncode for agent in running.agents), "the job failed, and says so"
    # A machine that is slow to start processes is as slow to end them.
    slow = max(1.0, (event - began) / (QUIET_S * ranks * len(agents) / 2))
    return Ended(output, ended - event, DEADLINE_S + 5.0 * slow)


# ---- found when the ranks meet ----


def skips_a_broadcast(ended: Ended, who: int, ranks: int) -> None:
    there = r"broadcast \(generation (\d+)\)"
    ended.says(*(rf"rank {rank}: " + (r"generate_stale \(generation" if rank == who else there) for rank in range(ranks)))
    ended.says("RanksDiverged: the ranks are not at the same step")


def takes_a_step_twice(ended: Ended, who: int, ranks: int) -> None:
    ended.says(*(rf"rank {rank}: {'train_step' if rank == who else 'finish_batch'} \(generation" for rank in range(ranks)))
    ended.says("RanksDiverged: the ranks are not at the same step")


# ---- a rank that ends ----


def raises_in_a_step(ended: Ended, who: int, ranks: int) -> None:
    ended.says(rf"rank {who}: train_step \(generation 7\) failed; where the ranks are:\n(  rank .*\n){{{ranks}}}")
    ended.says(rf"rank {who}: train_step \(generation 7\); failed in it \(ValueError: this rank went astray\)")
    ended.says(*(rf"rank {rank}: train_step \(generation 7\); .*process \d+ on " for rank in range(ranks)))


def raises_between_steps(ended: Ended, who: int, ranks: int) -> None:
    # A process takes seconds to end: torchrun, the listening thread or the deadline, whichever comes first. Where the torchrun that
    # keeps the store comes first, what the others said is gone with it.
    left = "the store where the ranks meet is gone" not in ended.output
    ended.says("ended by SIGTERM|ended, since|RanksDiverged: (not every rank came to compute_old_logprobs|the store where)")
    ended.says(rf"rank {who}: not here; last seen at generate_stale .* \(ValueError: this rank went astray\)" if left else "went astray")
    ended.says(*(rf"rank {rank}: compute_old_logprobs .*; waits there for the others" for rank in range(ranks) if rank != who))


def killed_in_a_step(ended: Ended, who: int, ranks: int) -> None:
    ended.says(*(rf"rank {rank}: train_step \(generation 7\)" for rank in range(ranks)))
    ended.says(rf"rank {who}: .*process \d+ on \S+, which has ended")


def killed_between_steps(ended: Ended, who: int, ranks: int) -> None:
    ended.says(rf"rank {who}: not here; last seen at generate_stale .*process \d+ on \S+, which has ended")
    ended.says(*(rf"rank {rank}: compute_old_logprobs" for rank in range(ranks) if rank != who))


# ---- a rank that does not come ----


def sleeps_in_a_step(ended: Ended, who: int, ranks: int) -> None:
    ended.says(rf"rank {who}: train_step \(generation 7\); in it for [4-9] s, at diverging.py:\d+ in act")
    ended.says(*(rf"rank {rank}: train_step \(generation 7\)" for rank in range(ranks)))


def sleeps_between_steps(ended: Ended, who: int, ranks: int) -> None:
    ended.says("RanksDiverged: not every rank came to compute_old_logprobs .* within 5 s")
    ended.says(rf"rank {who}: not here; last seen at generate_stale .* after it for \d s, at diverging.py:\d+ in act")
    ended.says(*(rf"rank {rank}: compute_old_logprobs" for rank in range(ranks) if rank != who))


SCENES = (
    skips_a_broadcast,
    takes_a_step_twice,
    raises_in_a_step,
    raises_between_steps,
    killed_in_a_step,
    killed_between_steps,
    sleeps_in_a_step,
    sleeps_between_steps,
)


@pytest.mark.parametrize(
    ("scene", "who"),
    [
        (raises_in_a_step, 1),
        *(pytest.param(scene, who, marks=pytest.mark.slow) for scene in SCENES for who in (0, 1) if (scene, who) != (raises_in_a_step, 1)),
    ],
)
def test_two_ranks_end_together(scene: Callable[[Ended, int, int], None], who: int, model: Path, tmp_path: Path) -> None:
    ended = astray(scene.__name__.replace("_", " "), who, model=model, folder=tmp_path)
    scene(ended, who, 2)
    ended.in_time()


@pytest.mark.parametrize(
    ("scene", "who"),
    [(killed_in_a_step, 3), *(pytest.param(scene, who, marks=pytest.mark.slow) for scene in SCENES for who in (0, 2))],
)
def test_four_ranks_end_together(scene: Callable[[Ended, int, int], None], who: int, model: Path, tmp_path: Path) -> None:
    ended = astray(scene.__name__.replace("_", " "), who, model=model, folder=tmp_path, ranks=4)
    scene(ended, who, 4)
    ended.in_time()


def test_a_rank_that_waits_in_a_collective_tells_where_all_are_when_it_is_asked(model: Path, tmp_path: Path) -> None:
    def ask(running: Job) -> None:
        time.sleep(1.5)  # until the others wait for the one that sleeps
        running.ranks()[0].send_signal(signal.SIGUSR1)

    ended = astray("sleeps in a step", 1, model=model, folder=tmp_path, meanwhile=ask)
    sleeps_in_a_step(ended, 1, 2)
    ended.in_time()
    _, _, told = ended.output.partition("asked by SIGUSR1 where the ranks are:\n")
    table, _, stack = told.partition("\nthread MainThread:\n")
    assert re.search(r"rank 0: train_step \(generation 7\); in it for \d s, at \S+:\d+ in \S+, from diverging.py:\d+ in train", table)
    assert re.search(r"rank 1: train_step \(generation 7\); in it for \d s, at diverging.py:\d+ in act", table)
    assert "torch.autograd.backward" in stack
    assert "ended by SIGUSR1" not in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("what", ["sleeps", "raises"])
def test_a_loop_that_catches_every_error_ends_too(what: str, who: int, model: Path, tmp_path: Path) -> None:
    ended = astray(f"{what} in a step and catches", who, model=model, folder=tmp_path)
    ended.says("caught RuntimePoisoned", "ended, since", r"rank 0: train_step \(generation 3\)", r"rank 1: train_step \(generation 3\)")
    ended.in_time()


# ---- two nodes ----


@pytest.mark.slow
@pytest.mark.parametrize("form", ["c10d", "static"])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("scene", [raises_in_a_step, raises_between_steps, killed_in_a_step, sleeps_in_a_step])
def test_two_nodes_end_together(scene: Callable[[Ended, int, int], None], who: int, form: Form, model: Path, tmp_path: Path) -> None:
    ended = astray(scene.__name__.replace("_", " "), who, model=model, folder=tmp_path, ranks=1, agents=two_nodes(form))
    scene(ended, who, 2)
    ended.in_time()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["c10d", "static"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_sleeps_on_another_node_is_ended_there(form: Form, who: int, model: Path, tmp_path: Path) -> None:
    ended = astray("sleeps between steps", who, model=model, folder=tmp_path, ranks=1, agents=two_nodes(form))
    sleeps_between_steps(ended, who, 2)
    ended.in_time()


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_ranks_whose_torchrun_is_killed_end_by_themselves(who: int, model: Path, tmp_path: Path) -> None:
    def kill(running: Job) -> None:
        running.agents[who].kill()

    ended = astray("sleeps between steps", 1 - who, model=model, folder=tmp_path, ranks=1, agents=two_nodes("static"), meanwhile=kill)
    ended.says("torchrun")
    ended.in_time()

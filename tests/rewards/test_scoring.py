import subprocess
import sys
import threading
import time

import numpy
import pytest
import torch

from rft.errors import BadInput
from rft.rewards.scoring import Rewards, Sample, samples_of, score
from tests.rollouts import rollouts


def failed(rewards: Rewards):
    return [(f.row, f.kind) for f in rewards.failures]


def test_a_reward_sees_the_sample():
    assert samples_of(rollouts("a", "b"))[1] == Sample(question="q", response="b", answer="3", finish="stop", tokens=1)
    rewards = score(rollouts("a", "bb", "ccc"), lambda s: len(s.response) / 2)
    assert rewards.values.tolist() == [0.5, 1.0, 1.5]
    assert rewards.valid.all()
    assert rewards.failures == ()
    assert rewards.mean() == 1.0


@pytest.mark.parametrize("value", [True, 1, 1.0, numpy.float32(1.0), numpy.int64(1), numpy.array(1), torch.tensor(1.0), torch.tensor(True)])
def test_what_is_a_number(value):
    assert score(rollouts("a"), lambda _: value).values.tolist() == [1.0]


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), 1e300, 1 + 1j, [1.0], torch.ones(1), torch.tensor(torch.nan)])
def test_nonsense_is_a_failure_and_no_zero(value):
    rewards = score(rollouts("good", "bad"), lambda s: value if s.response == "bad" else 2.0)
    assert failed(rewards) == [(1, "nonsense")]
    assert rewards.valid.tolist() == [True, False]
    assert rewards.values.isfinite().all()
    assert rewards.mean() == 2.0


def test_raising_is_a_failure_of_its_row_alone():
    def reward(sample):
        if sample.response == "bad":
            raise KeyError("no such unit")
        if sample.response == "exit":
            sys.exit(3)
        return 1.0

    rewards = score(rollouts("a", "bad", "b", "exit"), reward)
    assert failed(rewards) == [(1, "raised"), (3, "raised")]
    assert "KeyError: 'no such unit'" in rewards.failures[0].message
    assert rewards.valid.tolist() == [True, False, True, False]


def test_sleeping_and_busy_hangs_meet_the_deadline_and_busy_ones_end():
    def reward(sample):
        while sample.response == "busy":
            pass
        if sample.response == "asleep":
            time.sleep(60)
        return 1.0

    began = time.monotonic()
    rewards = score(rollouts("a", "busy", "asleep", "b"), reward, deadline_s=0.2)
    assert time.monotonic() - began < 2
    assert failed(rewards) == [(1, "deadline"), (2, "deadline")]
    assert "0.2 s" in rewards.failures[0].message
    time.sleep(0.2)
    assert sum(thread.name == "rft-reward" for thread in threading.enumerate()) == 1, "the busy one has been ended"


def test_rows_are_scored_at_the_same_time_where_asked():
    four = threading.Barrier(4)  # lets nobody pass before four wait at once
    rewards = score(rollouts(*"abcdefgh"), lambda s: four.wait(timeout=9) * 0 + float(ord(s.response)), workers=4)
    assert rewards.failures == ()
    assert rewards.values.tolist() == [float(ord(letter)) for letter in "abcdefgh"]


def test_a_hanging_reward_does_not_keep_the_process():
    script = (
        "import time; from rft.rewards.scoring import score; from tests.rollouts import rollouts\n"
        "print(score(rollouts('a'), lambda _: time.sleep(60) or 1.0, deadline_s=0.1).failures[0].kind)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "deadline\n")


def test_what_is_no_function_is_refused():
    with pytest.raises(BadInput, match="a reward is a function of a Sample"):
        score(rollouts("a"), "last_number")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"deadline_s": 0}, "deadline_s must be above 0"),
        ({"deadline_s": -1}, "deadline_s must be above 0"),
        ({"deadline_s": float("nan")}, "deadline_s must be above 0 and finite, .* got nan"),
        ({"deadline_s": float("inf")}, "deadline_s must be above 0 and finite, .* got inf"),
        ({"deadline_s": "1"}, r"rewards\(state, rollouts, reward\): deadline_s must be float, got '1'"),
        ({"workers": 0}, "workers at least 1"),
        ({"workers": 1.5}, r"rewards\(state, rollouts, reward\): workers must be int, got 1.5"),
    ],
)
def test_limits_that_cannot_work(bad, says):
    with pytest.raises(BadInput, match=says):
        score(rollouts("a"), lambda _: 1.0, **bad)


def test_no_rows():
    rewards = score(rollouts(), lambda _: 1.0)
    assert len(rewards.values) == 0

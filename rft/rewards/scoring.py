"""A reward function is any `Callable[[Sample], float]`; this module runs one over rollouts and survives what it does.

Rewards run in daemon threads, not in processes: a process would need to be given the function by pickle and start without what the
job has loaded. So a hang is survived as follows. A reward that sleeps or waits is left behind at the deadline. One that is busy in
Python gets an exception thrown into it, and ends. One that sits in C code ends when it returns to Python; where that code holds
the interpreter lock (a regular expression that backtracks for ever) nothing in this process can go on until then, and the
lock-step deadline of the ranks is what ends the job.
"""

import ctypes
import dataclasses as dc
import logging
import math
import numbers
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float32
from torch import Tensor

from rft import tree
from rft.errors import BadInput
from rft.experience import Rollouts
from rft.sampling import Finish
from rft.shapes import check_record, require_hint, require_kind

log = logging.getLogger("rft")


@dc.dataclass(frozen=True, kw_only=True)
class Sample:
    """What a reward function sees of one response."""

    question: str
    response: str
    """The sampled tokens as text, without special ones."""
    answer: str
    """The reference answer of the data set."""
    finish: Finish
    tokens: int
    """Length of the response; a sampled end token counts."""


RewardFunction = Callable[[Sample], float]


@dc.dataclass(frozen=True, kw_only=True)
class RewardFailure:
    """Why row `row` has no reward: its function raised, did not end before the deadline, or returned no finite number."""

    row: int
    kind: Literal["raised", "deadline", "nonsense"]
    message: str


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Rewards:
    """One reward per row, always finite. Where `valid` is False there is none (`values` is 0 there, and means nothing).

    A row without a reward is to be left out of everything that is computed from rewards, means and advantages included.
    """

    values: Float32[Tensor, "batch"]
    valid: Bool[Tensor, "batch"]
    failures: tuple[RewardFailure, ...]

    def __post_init__(self) -> None:
        check_record(self)

    def mean(self) -> float:
        """Mean over the valid rows; NaN where there are none."""
        return float(self.values[self.valid].mean())


def samples_of(rollouts: Rollouts) -> tuple[Sample, ...]:
    """What reward functions see of each row of `rollouts`."""
    columns = zip(rollouts.questions, rollouts.responses, rollouts.answers, rollouts.finish, rollouts.sampled.sum(1).tolist(), strict=True)
    return tuple(Sample(question=q, response=r, answer=a, finish=f, tokens=n) for q, r, a, f, n in columns)


def score(rollouts: Rollouts, reward: RewardFunction, *, deadline_s: float = 10.0, workers: int = 1) -> Rewards:
    """The reward of every row. A row whose reward fails gets a named failure and `valid` False, never a silent 0.

    `deadline_s` is per row; `workers` rows are scored at a time (more than 1 needs a reward that is thread-safe, and pays where it
    waits for something). If every row hangs this takes rows · deadline_s / workers. Raises `BadInput` for what neither can be.
    """
    require_kind("rewards(state, rollouts, reward)", "rollouts", rollouts, Rollouts)
    if not callable(reward):
        raise BadInput(f"a reward is a function of a Sample that returns a number, got {type(reward).__name__}")
    require_hint("rewards(state, rollouts, reward): deadline_s", deadline_s, float)
    require_hint("rewards(state, rollouts, reward): workers", workers, int)
    if not 0 < deadline_s < math.inf or workers < 1:
        raise BadInput(f"deadline_s must be above 0 and finite, and workers at least 1, got {deadline_s} and {workers}")
    outcomes = _outcomes(samples_of(rollouts), reward, deadline_s, workers)
    failures = tuple(RewardFailure(row=row, kind=o.kind, message=o.message) for row, o in enumerate(outcomes) if isinstance(o, _Failure))
    if failures:
        log.warning("%d of %d rewards failed; row %d %s", len(failures), len(outcomes), failures[0].row, failures[0].message)
    return Rewards(
        values=torch.tensor([0.0 if isinstance(o, _Failure) else o for o in outcomes], dtype=torch.float32),
        valid=torch.tensor([not isinstance(o, _Failure) for o in outcomes], dtype=torch.bool),
        failures=failures,
    )


def given(values: Float32[Tensor, "batch"]) -> Rewards:
    """Rewards that were computed together, such as a reward model's. One that is not finite is a named failure of its row."""
    valid = values.isfinite()
    rows = (~valid).nonzero()[:, 0].tolist()
    failures = tuple(RewardFailure(row=row, kind="nonsense", message=f"is {float(values[row])}, which is not finite") for row in rows)
    if failures:
        log.warning("%d of %d rewards failed; row %d %s", len(failures), len(values), failures[0].row, failures[0].message)
    return Rewards(values=torch.where(valid, values, 0.0), valid=valid, failures=failures)


# ---- one call of a reward, in a thread of its own ----


@dc.dataclass(frozen=True)
class _Failure:
    kind: Literal["raised", "deadline", "nonsense"]
    message: str


class _Abandoned(BaseException):
    """Thrown into a reward that is still running at its deadline; not an `Exception`, so that it is not caught by the reward."""


class _Call(threading.Thread):
    """One call of a reward; a daemon, so that a reward that hangs for ever does not keep the job from ending."""

    def __init__(self, reward: RewardFunction, sample: Sample) -> None:
        super().__init__(daemon=True, name="rft-reward")
        self.reward, self.sample = reward, sample
        self.outcome: float | _Failure = _Failure("raised", "ended its thread without returning a value")
        self.began = time.monotonic()

    def run(self) -> None:
        try:
            self.outcome = _number(self.reward(self.sample))
        except _Abandoned:
            pass
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a reward raises is its sample's failure, and is told)
            self.outcome = _Failure("raised", f"raised {type(error).__name__}: {error}")

    def wait(self, deadline_s: float) -> float | _Failure:
        self.join(max(0.0, self.began + deadline_s - time.monotonic()))
        if self.is_alive():
            _throw_into(self)
            return _Failure("deadline", f"was not ready after {deadline_s:g} s")
        return self.outcome


def _outcomes(samples: Sequence[Sample], reward: RewardFunction, deadline_s: float, workers: int) -> list[float | _Failure]:
    running, outcomes = deque[_Call](), list[float | _Failure]()
    for sample in samples:
        if len(running) == workers:
            outcomes.append(running.popleft().wait(deadline_s))
        call = _Call(reward, sample)
        call.start()
        running.append(call)
    return [*outcomes, *(call.wait(deadline_s) for call in running)]


def _number(value: Any) -> float | _Failure:
    if getattr(value, "shape", None) == ():
        value = value.item()  # a tensor or an array of one number, without an axis
    if not isinstance(value, numbers.Real):
        return _Failure("nonsense", f"returned a {type(value).__name__} ({str(value)[:80]}), not a number")
    single = float(torch.tensor(float(value), dtype=torch.float32))
    return single if math.isfinite(single) else _Failure("nonsense", f"returned {value}, which is not finite in float32")


def _throw_into(thread: threading.Thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Abandoned))

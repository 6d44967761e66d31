"""The watch over a synced engine: a short fixed probe, scored by the Actor and by the engine; and the rollouts, as both score them.

Checksums say that the bytes arrived; the probe says that the engine computes with them what the Actor computes. It cannot see one
step at a small learning rate, which lies below bf16's noise; checksums can. What the engine really sampled is seen in every step that
trains on it, by whatever it was sampled, so that only a jump says something.
"""

import dataclasses as dc
import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import torch

from rft.engines.protocol import Engine
from rft.models import ModelFolder
from rft.state import PolicyVersion
from rft.trainers.protocol import Trainer

log = logging.getLogger("rft")

TEXT = "The quick brown fox jumps over the lazy dog. What is 17 + 25? The answer is 42, and 42 is not a prime number."
LENGTH = 32
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}
"""Largest mean gap, in nats, that is no alarm; by the dtype of engine or Actor that is the coarser. (Single tokens differ by up to 0.5
in bfloat16.)"""
MEMORY, FACTOR = 16, 4.0
"""A gap is an alarm, too, if it is above FACTOR times the median of the last MEMORY, and above a hundredth of the tolerance."""
KEPT = 10_000
"""Gaps that are remembered."""
Seen = Literal["probe", "rollouts"]


@dc.dataclass(frozen=True, kw_only=True)
class Gap:
    """|log p_engine − log p_Actor| over the tokens of the probe, or of what was trained on, in nats, while the Actor was at `version`."""

    of: Seen
    version: PolicyVersion
    mean: float
    largest: float
    alarm: str | None
    """Why this is an alarm; None: it is none."""


class Watch:
    """Scores the probe after every `every` wakes (0: never) and keeps what it saw.

    Where the Actor is offloaded when the engine wakes, the engine's scores wait for it, as long as the version stays the same.
    """

    def __init__(self, every: int, model: ModelFolder) -> None:
        self._every, self._wakes = every, 0
        self._probe = _probe(model.tokenizer)
        self._waiting: tuple[PolicyVersion, tuple[int, ...], list[float], torch.dtype] | None = None
        self._recent: dict[Seen, deque[float]] = {"probe": deque(maxlen=MEMORY), "rollouts": deque(maxlen=MEMORY)}
        self.gaps = deque[Gap](maxlen=KEPT)

    def ask_engine(self, engine: Engine, version: PolicyVersion) -> None:
        """Counts a wake, and scores the probe if it is due."""
        self._wakes += 1
        if self._every and self._wakes % self._every == 0:
            probe = self._probe[: max(engine.max_model_len - 1, 2)]  # an engine may have to sample a token behind what it scores
            self._waiting = version, probe, engine.score([probe])[0], engine.dtype

    def ask_actor(self, trainer: Trainer, version: PolicyVersion, after: str) -> None:
        """Scores the probe by the Actor and compares, if the engine's scores of this version wait for it. Collective."""
        if self._waiting is None:
            return
        scored, probe, engine, dtype = self._waiting
        self._waiting = None
        if scored != version:
            return
        tokens = torch.tensor([probe])
        later = (torch.arange(len(probe)) > 0)[None]
        actor = trainer.logprobs(tokens, torch.ones_like(later), later, 1.0)[0, 1:]
        gaps = (torch.tensor(engine) - actor).abs()
        self._judge("probe", float(gaps.mean()), float(gaps.max()), version, after, max(TOLERANCE[dtype], TOLERANCE[trainer.dtype]))

    def see_rollouts(self, mean: float, largest: float, after: str, version: PolicyVersion, *dtypes: torch.dtype) -> None:
        """Takes the gap over the sampled tokens of a step's batch, which all ranks know alike; `dtypes` are those of engine and Actor."""
        self._judge("rollouts", mean, largest, version, after, max(TOLERANCE[dtype] for dtype in dtypes))

    def memory(self) -> dict[str, Any]:
        """What later judgements depend on, as plain data."""
        return {"wakes": self._wakes, "recent": {of: list(gaps) for of, gaps in self._recent.items()}}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Goes on from what `memory` gave; scores that waited for the Actor were of weights that are gone."""
        self._wakes, self._waiting = memory["wakes"], None
        for of, gaps in self._recent.items():
            gaps.clear()
            gaps.extend(memory["recent"][of])

    def _judge(self, of: Seen, mean: float, largest: float, version: PolicyVersion, after: str, tolerance: float) -> None:
        recent = self._recent[of]
        jump = max(FACTOR * statistics.median(recent), tolerance / 100) if len(recent) == MEMORY else math.inf
        bound = min(tolerance, jump) if of == "probe" else jump
        alarm = None
        if not (math.isfinite(mean) and mean <= bound):
            where = "the probe" if of == "probe" else "sampled tokens"
            alarm = f"engine and Actor differ by {mean:.4g} nats on {where} after {after} (version {version}); at most {bound:.4g} is usual"
            log.warning("%s", alarm)
        if math.isfinite(mean):
            recent.append(mean)
        self.gaps.append(Gap(of=of, version=version, mean=mean, largest=largest, alarm=alarm))


def _probe(tokenizer: Any) -> tuple[int, ...]:
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    return tuple(tokens[:LENGTH])

"""The fullest that this rank's device was while a step was taken."""

import dataclasses as dc
from collections.abc import Mapping, Sequence

import torch

PHASE_OF = {
    "broadcast": "broadcast",
    "wake": "generate",
    "generate": "generate",
    "generate_stale": "generate",
    "compute_old_logprobs": "old log-probs",
    "reference_logprobs": "reference",
    "values": "critic",
    "train_critic": "critic",
    "model_rewards": "rewards",
    "train_step": "train",
    "supervised_step": "train",
    "update_ema": "ema",
}
"""Which phase of a plan each step belongs to."""


@dc.dataclass(frozen=True)
class Peak:
    """Bytes of the device in use at most, by whatever process: without what PyTorch's allocator keeps unused, and with it."""

    used: int
    kept: int


class PeakMeter:
    """Measures between `begin` and `end`; on a machine without CUDA there is nothing to measure.

    The driver knows what is used now, and the allocator what was the most; memory that an engine has unmapped is still counted by the
    allocator and not by the driver, so the two are put together where both were looked at: at the beginning and at the end.
    """

    def __init__(self) -> None:
        self._outside: int | None = None

    def begin(self) -> None:
        """A step begins."""
        self._outside = None
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
            self._begun = Peak(*self._now())
            self._outside = self._begun.kept - torch.cuda.memory_reserved()

    def end(self) -> Peak | None:
        """The most since `begin`; None where nothing was measured."""
        if self._outside is None:
            return None
        used, kept = self._now()
        outside = kept - torch.cuda.memory_reserved()
        # An engine that wakes takes what the allocator may have had before: of what was kept then, only what is sure counts.
        most = torch.cuda.max_memory_reserved() + min(outside, self._outside)
        used = max(used, torch.cuda.max_memory_allocated() + outside, self._begun.used)
        return Peak(used=used, kept=max(used, kept, most, self._begun.kept))

    def _now(self) -> tuple[int, int]:
        """What is in use, and that with what the allocator keeps."""
        free, total = torch.cuda.mem_get_info()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return total - free - unused, total - free


@dc.dataclass(frozen=True, kw_only=True)
class Compared:
    """A phase's peak as planned and as measured, in bytes; None where it was not."""

    phase: str
    planned: Peak | None
    measured: Peak | None


def compared(planned: Mapping[str, Peak], spans: Sequence[tuple[str, Peak]]) -> list[Compared]:
    """Planned phases in their order, then those that were measured alone; of each the fullest span of its steps (name, peak)."""
    measured: dict[str, Peak] = {}
    for name, peak in spans:
        phase = PHASE_OF.get(name)
        if phase is not None:
            seen = measured.get(phase, peak)
            measured[phase] = Peak(used=max(seen.used, peak.used), kept=max(seen.kept, peak.kept))
    names = dict.fromkeys([*planned, *measured])
    return [Compared(phase=name, planned=planned.get(name), measured=measured.get(name)) for name in names]

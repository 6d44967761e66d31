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
    allocator and not by the driver, so the two are put together where they were both looked at: at the beginning and at the end.
    """

    def __init__(self) -> None:
        self._before: Peak | None = None

    def begin(self) -> None:
        """A step begins."""
        self._before = None
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
            self._before = self._peak()

    def end(self) -> Peak | None:
        """The most since `begin`; None where nothing was measured."""
        if self._before is None:
            return None
        before, after = self._before, self._peak()
        return Peak(used=max(before.used, after.used), kept=max(before.kept, after.kept))

    def _peak(self) -> Peak:
        """The most that the allocator had, over what lies outside of it now."""
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        return Peak(used=torch.cuda.max_memory_allocated() + outside, kept=torch.cuda.max_memory_reserved() + outside)


@dc.dataclass(frozen=True, kw_only=True)
class Compared:
    """A phase's peak as planned and as measured, in bytes; None where it was not."""

    phase: str
    planned: int | None
    measured: Peak | None


def compared(planned: Mapping[str, int], spans: Sequence[tuple[str, Peak]]) -> list[Compared]:
    """Planned phases in their order, then those that were measured alone; of each the fullest span of its steps (name, peak)."""
    measured: dict[str, Peak] = {}
    for name, peak in spans:
        phase = PHASE_OF.get(name)
        if phase is not None:
            seen = measured.get(phase, peak)
            measured[phase] = Peak(used=max(seen.used, peak.used), kept=max(seen.kept, peak.kept))
    names = dict.fromkeys([*planned, *measured])
    return [Compared(phase=name, planned=planned.get(name), measured=measured.get(name)) for name in names]

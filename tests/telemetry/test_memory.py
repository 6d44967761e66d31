import torch

from rft.steps.table import rows_of_the_library
from rft.telemetry.memory import PHASE_OF, Compared, Peak, PeakMeter, compared

GIB = 1 << 30


class Card:
    """A card of 100 GiB with 5 outside of the allocator; what an engine has unmapped the allocator counts, and the driver does not."""

    def __init__(self, monkeypatch):
        self.allocated = self.reserved = self.most = self.most_reserved = self.unmapped = 0
        for name in ("is_initialized", "reset_peak_memory_stats", "mem_get_info", "memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.most)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: self.most_reserved)

    def is_initialized(self):
        return True

    def reset_peak_memory_stats(self):
        self.most, self.most_reserved = self.allocated, self.reserved

    def mem_get_info(self):
        return 100 * GIB - (5 * GIB + self.reserved - self.unmapped), 100 * GIB

    def memory_reserved(self):
        return self.reserved

    def takes(self, allocated, reserved):
        self.allocated, self.reserved = self.allocated + allocated * GIB, self.reserved + reserved * GIB
        self.most, self.most_reserved = max(self.most, self.allocated), max(self.most_reserved, self.reserved)


def test_without_cuda_nothing_is_measured():
    meter = PeakMeter()
    meter.begin()
    assert meter.end() is None


def test_the_most_within_a_step_counts(monkeypatch):
    card, meter = Card(monkeypatch), PeakMeter()
    card.takes(50, 50)
    card.takes(-20, 0)
    meter.begin()
    card.takes(10, 0)
    card.takes(5, 3)
    card.takes(-40, -10)
    assert meter.end() == Peak(used=(5 + 45) * GIB, kept=(5 + 53) * GIB)


def test_what_an_engine_unmaps_within_a_step_was_there_and_what_it_maps_is(monkeypatch):
    card, meter = Card(monkeypatch), PeakMeter()
    card.takes(30, 30)
    meter.begin()
    card.unmapped = 20 * GIB  # it sleeps
    assert meter.end() == Peak(used=35 * GIB, kept=35 * GIB)
    meter.begin()
    assert meter.end() == Peak(used=15 * GIB, kept=15 * GIB)
    meter.begin()
    card.unmapped = 0  # it wakes
    assert meter.end() == Peak(used=35 * GIB, kept=35 * GIB)


def test_what_the_allocator_gave_back_before_an_engine_took_it_was_not_there_twice(monkeypatch):
    card, meter = Card(monkeypatch), PeakMeter()
    card.takes(30, 60)
    card.unmapped = 20 * GIB  # so that 5 outside, 10 of the allocator's and 30 unused are on the card
    meter.begin()
    card.takes(0, -30)
    card.unmapped = 0
    assert meter.end() == Peak(used=35 * GIB, kept=45 * GIB)


def test_a_phase_has_the_fullest_of_its_steps():
    spans = [("wake", Peak(3, 9)), ("generate", Peak(5, 7)), ("sleep", Peak(99, 99)), ("values", Peak(1, 2))]
    assert compared({"train": Peak(7, 8), "generate": Peak(5, 6)}, spans) == [
        Compared(phase="train", planned=Peak(7, 8), measured=None),
        Compared(phase="generate", planned=Peak(5, 6), measured=Peak(5, 9)),
        Compared(phase="critic", planned=None, measured=Peak(1, 2)),
    ]


def test_phases_are_of_steps_that_there_are():
    assert set(PHASE_OF) <= {row.name for row in rows_of_the_library()}

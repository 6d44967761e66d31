import math

import pytest

from rft.errors import BadInput
from rft.spec import FSDP2Trainer
from rft.trainers.schedule import learning_rate


def rates(spec: FSDP2Trainer, *steps: int) -> list[float]:
    return [round(learning_rate(spec, step), 12) for step in steps]


def test_constant() -> None:
    assert rates(FSDP2Trainer(lr=2.0), 0, 1, 1000) == [2.0, 2.0, 2.0]
    assert rates(FSDP2Trainer(lr=2.0, warmup_steps=4), 0, 1, 3, 4, 99) == [0.0, 0.5, 1.5, 2.0, 2.0]


def test_linear() -> None:
    spec = FSDP2Trainer(lr=2.0, schedule="linear", warmup_steps=2, total_steps=10)
    assert rates(spec, 0, 1, 2, 6, 9, 10, 11) == [0.0, 1.0, 2.0, 1.0, 0.25, 0.0, 0.0]


def test_cosine() -> None:
    spec = FSDP2Trainer(lr=2.0, schedule="cosine", total_steps=6)
    assert rates(spec, 0, 2, 3, 4, 6, 7) == [2.0, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert learning_rate(spec, 1) == pytest.approx(1 + math.cos(math.pi / 6))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("total", [None, 3, 2])
def test_without_an_end_after_the_warm_up_it_is_refused(schedule: str, total: int | None) -> None:
    with pytest.raises(BadInput, match="total_steps"):
        FSDP2Trainer(schedule=schedule, warmup_steps=3, total_steps=total)

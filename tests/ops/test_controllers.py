import dataclasses as dc
import io

import pytest
import torch
from torch import Tensor

from rft import tree
from rft.errors import BadInput, ShapeError
from rft.ops import controllers
from tests.ops.group_cases import SEEDS

NAN, INF = float("nan"), float("inf")


def kl(value: float) -> Tensor:
    return torch.tensor(value)


def test_fixed_stays() -> None:
    controller = controllers.fixed(0.05)
    state = controller.init()
    assert state.value.item() == 0.05
    for measured in (0.0, 100.0):
        state = controller.update(state, kl(measured), 8)
        assert state.value.item() == 0.05


def test_adaptive_by_hand() -> None:
    controller = controllers.adaptive(0.2, target=6.0, horizon=1000)
    start = controller.init()
    # half the target too much is cut to a fifth: 0.2 · (1 + 0.2 · 100/1000)
    assert controller.update(start, kl(9.0), 100).value.item() == pytest.approx(0.2 * 1.02, rel=1e-12)
    # a tenth too little: 0.2 · (1 − 0.1 · 100/1000)
    assert controller.update(start, kl(5.4), 100).value.item() == pytest.approx(0.2 * 0.99, rel=1e-6)
    assert controller.update(start, kl(0.0), 100).value.item() == pytest.approx(0.2 * 0.98, rel=1e-12)
    assert controller.update(start, kl(6.0), 100).value.item() == 0.2
    # nothing has changed in place
    assert start.value.item() == controller.init().value.item() == 0.2


def test_the_paper_s_gain_is_a_tenth() -> None:
    # K_β = 0.1 is a count of a tenth of the horizon
    controller = controllers.adaptive(1.0, target=6.0, horizon=10_000)
    assert controller.update(controller.init(), kl(60.0), 1000).value.item() == pytest.approx(1 + 0.1 * 0.2, rel=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_adaptive_against_a_loop(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    controller = controllers.adaptive(0.1, target=2.0, horizon=500)
    state, expected = controller.init(), 0.1
    for measured in 4 * torch.rand(50, generator=draw):
        count = int(torch.randint(1, 64, (), generator=draw))
        state = controller.update(state, measured, count)
        error = (measured.item() - 2.0) / 2.0
        expected *= 1 + (0.2 if error > 0.2 else -0.2 if error < -0.2 else error) * count / 500
        assert state.value.item() == pytest.approx(expected, rel=1e-12)


def test_it_finds_the_coefficient_that_holds_the_target() -> None:
    # A policy whose KL is 1 / β: at the target of 4, β is 1/4.
    controller = controllers.adaptive(2.0, target=4.0, horizon=100)
    state = controller.init()
    for _ in range(1000):
        state = controller.update(state, (1 / state.value).float(), 20)
    assert state.value.item() == pytest.approx(0.25, rel=1e-3)


def test_a_coefficient_is_saved_and_restored() -> None:
    state = controllers.adaptive(0.1, target=1.0, horizon=10).init()
    file = io.BytesIO()
    torch.save({f.name: getattr(state, f.name) for f in dc.fields(state)}, file)
    again = controllers.Coefficient(**torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert again.value.item() == 0.1
    assert [leaf.item() for leaf in tree.tree_leaves(state)] == [0.1]
    with pytest.raises(dc.FrozenInstanceError):
        state.value = torch.zeros(())


@pytest.mark.parametrize("value", [-0.1, NAN, INF])
def test_refused_coefficients(value: float) -> None:
    with pytest.raises(BadInput, match="fixed: value"):
        controllers.fixed(value)
    with pytest.raises(BadInput, match="adaptive: value"):
        controllers.adaptive(value, target=1.0, horizon=10)


def test_refused_targets() -> None:
    with pytest.raises(BadInput, match="target is 0"):
        controllers.adaptive(0.1, target=0.0, horizon=10)
    with pytest.raises(BadInput, match="horizon is -1"):
        controllers.adaptive(0.1, target=1.0, horizon=-1)


@pytest.mark.parametrize("controller", [controllers.fixed(0.1), controllers.adaptive(0.1, target=1.0, horizon=10)])
def test_refused_measurements(controller: controllers.Controller) -> None:
    for measured, count in ((NAN, 1), (INF, 1), (1.0, 0)):
        with pytest.raises(BadInput, match="finite KL of at least one response"):
            controller.update(controller.init(), kl(measured), count)
    with pytest.raises(ShapeError, match="update"):
        controller.update(controller.init(), torch.zeros(2), 1)


def test_a_step_that_would_turn_the_penalty_around_is_refused() -> None:
    controller = controllers.adaptive(0.1, target=1.0, horizon=10)
    assert controller.update(controller.init(), kl(0.0), 49).value.item() > 0
    with pytest.raises(BadInput, match="make it longer"):
        controller.update(controller.init(), kl(0.0), 50)


def test_a_coefficient_is_one_float64() -> None:
    with pytest.raises(ShapeError, match=r"Coefficient\.value"):
        controllers.Coefficient(value=torch.zeros(()))

"""The contract of critics, with FSDP2: on a model of its own, and on the Actor's hidden states."""

from typing import Any

import pytest

from rft.engines.faults import Faults
from rft.errors import BadInput
from rft.spec import Critic, FSDP2Trainer, SharedCritic, TransformersEngine
from rft.trainers.scripted import ScriptedTrainer
from tests.trainers.critic_contract import *  # noqa: F403
from tests.trainers.critic_contract import results

BACKENDS = ("fsdp2", "shared, fsdp2")
ALONE = [pytest.param((1, backend), id=f"{backend}, 1 rank", marks=pytest.mark.slow) for backend in BACKENDS]
CASES = [*ALONE, *(pytest.param((2, backend), id=f"{backend}, 2 ranks") for backend in BACKENDS)]


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, launched: Any) -> list[dict[str, Any]]:
    ranks, backend = request.param
    return results(launched(ranks, BACKENDS), ranks, backend)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Critic(where="disk"), "Critic.where must be 'device' or 'host', got 'disk'"),
        (lambda: Critic(trainer=TransformersEngine()), r"Critic.trainer must be a specification such as FSDP2Trainer\(\)"),
        (lambda: Critic(trainer=FSDP2Trainer(lr=-1.0)), "lr, weight_decay and warmup_steps must be at least 0"),
        (lambda: SharedCritic(max_grad_norm=0.0), "max_grad_norm above 0"),
        (lambda: SharedCritic(schedule="linear"), "schedule='linear' needs total_steps above"),
    ],
)
def test_a_specification_that_cannot_be_is_refused(made: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        _ = made()


def test_a_shared_critic_needs_a_trainer_that_is_read() -> None:
    world: Any = None
    with pytest.raises(BadInput, match=r"the trainer scripted gives none; take Critic\(…\) instead"):
        _ = SharedCritic().build(ScriptedTrainer(Faults()), world)

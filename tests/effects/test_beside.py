"""Models beside an Actor under FSDP2, in real launches on two ranks; and what is refused before anything runs, on scripted devices."""

from typing import Any

import pytest

import rft
from rft.objectives import critic_loss
from rft.testing import scripted_average, scripted_launch, scripted_minibatch
from tests.effects.company import *  # noqa: F403
from tests.effects.company import launched
from tests.refusals import failing, refused, sampled

KIND, BRIEF = rft.reward_model("kind"), rft.reward_model("brief")


@pytest.fixture(scope="module")
def seen(models: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launched(models, tmp_path_factory.mktemp("results"), "fsdp2")


# ---- on scripted devices ----


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (
            lambda state, rollouts: rft.reference_logprobs(state, rollouts),
            "REFERENCE is on the host; write instead: state = reload(state, R",
        ),
        (lambda state, rollouts: rft.reference_logprobs(state, rollouts, role=rft.EMA), "EMA is on the host"),
        (lambda state, rollouts: rft.reference_logprobs(state, rollouts, role=KIND), "only REFERENCE and EMA give log-probs"),
        (lambda state, rollouts: rft.reference_logprobs(state, rollouts, role=rft.Role("actor")), "only REFERENCE and EMA give log-probs"),
        (lambda state, rollouts: rft.model_rewards(state, rollouts, KIND), "reward_model('kind') is on the host"),
        (lambda state, rollouts: rft.model_rewards(state, rollouts, rft.ACTOR_OPTIMIZER), "this role is no reward model"),
        (lambda state, rollouts: rft.model_rewards(state, rollouts, rft.reward_model("none")), "there is no role reward_model('none')"),
        (lambda state, rollouts: rft.values(state, rollouts), "CRITIC is on the host"),
        (lambda state, rollouts: rft.train_critic(state, scripted_minibatch(rollouts), critic_loss()), "CRITIC is on the host"),
        (lambda state, _: rft.update_ema(state), "EMA is on the host"),
        (lambda state, _: rft.offload(state, rft.REFERENCE), "it is on the host already; leave it out, or reload it first"),
        (lambda state, _: rft.reload(state, rft.ACTOR_OPTIMIZER), "it is on the device already"),
        (lambda state, _: rft.reload(state, rft.Role("actor")), "the Actor is no role but an axis"),
        (lambda state, _: rft.use(state, rft.Role("nobody"), lambda there: there), "there is no role 'nobody' in this runtime"),
        (lambda state, _: rft.export(state, "folder", role=KIND), "besides the Actor (no role) there is REFERENCE, EMA"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_runs(ask: Any, says: str) -> None:
    with scripted_launch(beside="own") as begun:
        state = rft.refresh(begun)
        rollouts = sampled(state)
        with refused(state, rft.RoleError, says):
            _ = ask(state, rollouts)


def test_transitions_are_not_sent_to_use_which_refuses_them() -> None:
    with scripted_launch(beside="own") as begun:
        rollouts = sampled(rft.refresh(begun))
        state = rft.living(begun)
        for role, step in (
            ("EMA", rft.update_ema),
            ("CRITIC", lambda state: rft.train_critic(state, scripted_minibatch(rollouts), critic_loss())),
        ):
            with pytest.raises(rft.RoleError) as caught:
                _ = step(state)
            assert str(caught.value).endswith(f"{role} is on the host; write instead: state = reload(state, {role})")


def test_a_launch_without_company_has_none() -> None:
    with scripted_launch() as begun:
        state = rft.refresh(begun)
        rollouts = sampled(state)
        for role in (rft.REFERENCE, rft.EMA):
            with refused(state, rft.RoleError, f"there is no role {role.upper()} in this runtime; it has ACTOR_OPTIMIZER"):
                _ = rft.reference_logprobs(state, rollouts, role=role)


def test_only_so_many_reward_models_are_on_the_device() -> None:
    with scripted_launch(beside="own") as begun:
        state = rft.reload(begun, KIND)
        with refused(state, rft.RoleError, "reward_model('kind') is on the device, and reward_models_on_device=1"):
            _ = rft.reload(state, BRIEF)
        state = rft.reload(rft.offload(state, KIND), BRIEF)
        assert state.roles.of(BRIEF).where == "device"


def test_what_does_not_fit_is_not_fetched() -> None:
    with scripted_launch(beside="own", engine=False, device_bytes=440) as begun:
        with refused(begun, rft.DoesNotFit, "reload(state, REFERENCE)", "reference (to come)"):
            _ = rft.reload(begun, rft.REFERENCE)
        state = rft.reload(rft.offload(begun, rft.ACTOR_OPTIMIZER), rft.REFERENCE)
        assert state.roles.of(rft.REFERENCE).where == "device"


def test_use_fetches_asks_and_puts_away() -> None:
    with scripted_launch(beside="own") as begun:
        state = rft.refresh(begun)
        rollouts = sampled(state)
        state, scores = rft.use(state, KIND, lambda there: rft.model_rewards(there, rollouts, KIND))
        assert scores.values.tolist() == [float((t * m).sum()) for t, m in zip(rollouts.tokens, rollouts.mask, strict=True)]
        assert state.roles.of(KIND).where == "host"
        state = rft.reload(state, rft.REFERENCE)
        with refused(state, rft.RoleError, "it is on the device already"):
            _ = rft.use(state, rft.REFERENCE, lambda there: rft.reference_logprobs(there, rollouts))


def test_a_reference_by_the_actor_needs_the_actor() -> None:
    with scripted_launch(beside="by actor") as begun:
        state = rft.refresh(begun)
        rollouts = sampled(state)
        before = rft.reference_logprobs(state, rollouts)
        with refused(state, rft.RoleError, "it is computed by the Actor and has no memory of its own"):
            _ = rft.offload(state, rft.REFERENCE)
        state = rft.offload_actor(state)
        with refused(state, rft.RoleError, "REFERENCE is computed by the Actor, which is offloaded; write before it: state = reload_actor"):
            _ = rft.reference_logprobs(state, rollouts)
        with refused(state, rft.RoleError, "CRITIC is computed by the Actor, which is offloaded"):
            _ = rft.values(state, rollouts)
        state = rft.reload_actor(state)
        assert (rft.reference_logprobs(state, rollouts) == before).all()


def test_the_average_is_updated_from_an_actor_on_the_host_too() -> None:
    with scripted_launch(beside="own") as begun:
        state = rft.refresh(begun)
        rollouts = sampled(state)
        state = rft.reload(state, rft.EMA)
        state, _ = rft.supervised_step(state, scripted_minibatch(rollouts))
        state = rft.update_ema(rft.offload_actor(state))
        assert scripted_average(state).weights["body"].tolist() == [0.75, 0.75]


def test_an_average_that_fails_half_way_is_not_used_again() -> None:
    with scripted_launch(beside="own") as begun:
        state = rft.reload(begun, rft.EMA)
        with failing(state, "mix"), pytest.raises(rft.RuntimePoisoned):
            _ = rft.update_ema(state)
        with pytest.raises(rft.RuntimePoisoned):
            _ = rft.update_ema(state)

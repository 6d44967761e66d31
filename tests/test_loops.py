from collections.abc import Iterator

import pytest
import torch

import rft
from rft.data.minibatches import Cut
from rft.testing import SAMPLING, scripted_devices, scripted_launch, scripted_prompts
from tests.refusals import State

PROMPTS, HELD_OUT = scripted_prompts(3), scripted_prompts(4, epoch=7)


def reward(sample: rft.Sample) -> float:
    """Longer is better, and one kind of response raises."""
    if sample.response.startswith("1 "):
        raise ValueError("no reward for this one")
    return float(sample.tokens)


@pytest.fixture
def begun() -> Iterator[State]:
    with scripted_launch() as state:
        yield state


def test_refresh_of_an_engine_that_is_awake_uses_nothing_up(begun: State) -> None:
    state = rft.refresh(begun)
    with pytest.raises(rft.IllegalStep, match="state = broadcast"):
        _ = rft.refresh(state)
    assert type(rft.broadcast(state).weights) is rft.Fresh


def test_refresh_is_broadcast_and_wake(begun: State) -> None:
    state = rft.refresh(begun)
    assert rft.describe(state) == "RuntimeState[Awake, Fresh, OnDevice, NoOld] (version 0, generation 2)"


def test_collect_generates_and_scores_and_leaves_the_state_living(begun: State) -> None:
    state = rft.refresh(begun)
    collected = rft.collect(state, PROMPTS, SAMPLING, reward, draw=1)
    assert torch.equal(collected.rollouts.tokens, rft.generate(state, PROMPTS, SAMPLING, draw=1).tokens)
    valid = collected.rewards.valid
    assert torch.equal(collected.rewards.values[valid], collected.rollouts.sampled.sum(1).float()[valid])
    assert rft.legal(state)


def test_update_takes_one_step_for_each_mini_batch_and_finishes_the_batch(begun: State) -> None:
    state = rft.refresh(begun)
    rollouts = rft.generate(state, PROMPTS, SAMPLING)
    experience = rft.experience(rollouts, torch.ones(6), torch.ones(rollouts.tokens.shape))
    trained, history = rft.update(rft.compute_old_logprobs(state, rollouts), experience, rft.grpo(), Cut(size=2, epochs=2))
    assert rft.describe(trained) == "RuntimeState[Awake, Stale, OnDevice, NoOld] (version 6, generation 10)"
    assert len(history) == 6
    assert history[0]["ratio_mean"] == 1.0
    assert history[1]["ratio_mean"] != 1.0


def test_evaluate_gives_means_over_what_has_a_reward(begun: State) -> None:
    state = rft.refresh(begun)
    evaluation = rft.evaluate(state, HELD_OUT, SAMPLING, reward)
    rewards, rollouts = evaluation.collected.rewards, evaluation.collected.rollouts
    assert evaluation.reward == pytest.approx(rewards.mean())
    assert evaluation.length == pytest.approx(float(rollouts.sampled.sum(1).float().mean()))


def test_average_is_over_all_entries_and_an_empty_column_is_nan(begun: State) -> None:
    means = rft.average(begun, {"x": [1.0, 2.0, 6.0], "none": [], "one": iter([4])})
    assert (means["x"], means["one"]) == (3.0, 4.0)
    assert means["none"] != means["none"]


def test_training_after_an_evaluation_is_bit_identical_to_training_without_it() -> None:
    assert training(evaluating=True) == training(evaluating=False)


def training(*, evaluating: bool) -> list[object]:
    """Everything that three iterations see and leave behind."""
    trail: list[object] = []
    with scripted_launch(seed=11) as start:
        state = start
        for epoch in range(3):
            state = rft.refresh(state)
            if evaluating:
                _ = rft.evaluate(state, HELD_OUT, SAMPLING, reward)
            collected = rft.collect(state, scripted_prompts(3, epoch=epoch), SAMPLING, reward)
            rollouts = collected.rollouts
            state = rft.compute_old_logprobs(rft.sleep(state), rollouts)
            experience = rft.experience(rollouts, collected.rewards.values, collected.rewards.values[:, None] * rollouts.sampled)
            state, history = rft.update(state, experience, rft.grpo(), Cut(size=4, epochs=2))
            trail += [rollouts.tokens.tolist(), rollouts.logprobs.tolist(), collected.rewards.values.tolist(), history]
        devices = scripted_devices(state)
        return [*trail, {name: tensor.tolist() for name, tensor in devices.trainer.weights.items()}, state.version]

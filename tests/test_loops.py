import dataclasses as dc
import itertools
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rft
from rft.data.minibatches import Cut
from rft.testing import SAMPLING, scripted_devices, scripted_launch, scripted_prompts
from tests.refusals import State

MANY = rft.Sampling(samples=4, max_new_tokens=3)
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


def test_what_a_composition_is_given_is_checked_before_anything_moves(begun: State) -> None:
    nothing: Any = None
    with pytest.raises(rft.IllegalStep, match=r"needs a RuntimeState, got NoneType"):
        _ = rft.refresh(nothing)
    state = rft.refresh(begun)
    rollouts: Any = rft.generate(state, PROMPTS, SAMPLING)
    with pytest.raises(rft.BadInput, match="source must be Experience, got Rollouts"):
        _ = rft.update(rft.compute_old_logprobs(state, rollouts), rollouts, rft.grpo(), Cut())


def test_use_is_given_a_function() -> None:
    observed: Any = torch.zeros(2)
    with scripted_launch(beside="own") as state:
        with pytest.raises(rft.BadInput, match=r"observe must be a function of \(state\)"):
            _ = rft.use(state, rft.REFERENCE, observed)
        assert state.roles.of(rft.REFERENCE).where == "host"
        assert rft.legal(state)


@pytest.mark.parametrize("inside", [rft.sleep, lambda outer: rft.average(outer, {})])
def test_use_says_that_observe_is_given_its_state(inside: Any) -> None:
    with scripted_launch(beside="own") as begun:
        outer = rft.refresh(begun)
        with pytest.raises(rft.ConsumedState) as caught:
            _ = rft.use(outer, rft.REFERENCE, lambda _: inside(outer))
        said = str(caught.value)
        assert said.startswith("use(state, REFERENCE, observe): observe may only observe, and with the state that it is given")
        assert "state = offload(living(state), REFERENCE)\n  inside it, " in said
        state = rft.offload(rft.living(outer), rft.REFERENCE)
        assert state.roles.of(rft.REFERENCE).where == "host"


def test_use_says_that_observe_took_a_transition() -> None:
    with scripted_launch(beside="own") as begun:
        outer = rft.refresh(begun)
        with pytest.raises(
            rft.IllegalStep, match=r"observe took a transition, and may only observe; .* offload\(living\(state\), REFERENCE\)"
        ):
            _ = rft.use(outer, rft.REFERENCE, rft.sleep)
        assert rft.is_at(rft.living(outer), rft.Asleep, rft.Stale, rft.OnDevice, rft.NoOld)


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


def test_an_update_that_fails_half_way_is_gone_on_from(begun: State) -> None:
    state = rft.refresh(begun)
    rollouts = rft.generate(state, PROMPTS, SAMPLING)
    ones = torch.ones(rollouts.tokens.shape)
    broken = dc.replace(
        rft.experience(rollouts, torch.ones(6), ones), advantages=torch.where(torch.arange(6)[:, None] < 4, ones, torch.nan)
    )
    scored = rft.compute_old_logprobs(rft.sleep(state), rollouts)
    with pytest.raises(rft.BadInput, match="advantages"):
        _ = rft.update(scored, broken, rft.grpo(), Cut(size=2))
    reached = rft.living(begun)
    assert 0 < reached.version < 3, "some steps were taken"
    assert rft.is_at(reached, rft.Asleep, rft.Stale, rft.OnDevice, rft.OldLogProbs)
    assert rft.legal(rft.refresh(rft.finish_batch(reached)))


def test_a_use_whose_question_raises_is_gone_on_from() -> None:
    with scripted_launch(beside="own") as begun:
        with pytest.raises(ZeroDivisionError):
            _ = rft.use(begun, rft.REFERENCE, lambda there: 1 / (there.generation - 1))
        state = rft.offload(rft.living(begun), rft.REFERENCE)
        assert rft.use(state, rft.REFERENCE, lambda there: there.generation)[1] == 3


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


# ---- dynamic sampling ----


def by_beginning(sample: rft.Sample) -> float:
    """Differs within the groups whose responses do not begin alike; a response that begins with 1 has none."""
    first = int(sample.response.split()[0])
    if first == 1:
        raise ValueError("no reward for this one")
    return float(first > 5)


def batches(*, taken: list[int]) -> Iterator[rft.Prompts]:
    """Epoch after epoch, the same three questions under numbers of their own."""
    for epoch in range(100):
        taken.append(epoch)
        prompts = scripted_prompts(3, epoch=epoch)
        yield dc.replace(prompts, ids=prompts.ids + 10 * epoch)


def teaching(collected: rft.Collected) -> dict[int, list[float]]:
    """The valid rewards of each group, by group."""
    columns = zip(collected.rollouts.groups.tolist(), collected.rewards.values.tolist(), collected.rewards.valid.tolist(), strict=True)
    result: dict[int, list[float]] = {}
    for group, reward_, valid in columns:
        result.setdefault(group, []).extend([reward_] if valid else [])
    return result


def test_groups_are_collected_until_enough_of_them_teach(begun: State) -> None:
    state, taken = rft.refresh(begun), list[int]()
    collected = rft.collect_groups(state, batches(taken=taken), MANY, by_beginning, rft.Wanted(groups=4, bound=50))
    found = teaching(collected)
    assert len(found) == 4
    assert all(len(set(values)) > 1 for values in found.values())
    assert len(collected.rollouts) == 4 * MANY.samples

    every = [rft.collect(state, prompts, MANY, by_beginning, draw=k) for k, prompts in zip(taken, batches(taken=[]), strict=False)]
    useful = [g for part in every for g, values in teaching(part).items() if len(set(values)) > 1]
    assert list(found) == useful[:4], "the first ones, in their order"
    assert len([g for part in every[:-1] for g, values in teaching(part).items() if len(set(values)) > 1]) < 4, "and no batch too many"
    for row, reward_ in enumerate(collected.rewards.values.tolist()):
        assert not collected.rewards.valid[row] or reward_ == float(int(collected.rollouts.responses[row].split()[0]) > 5)
    failed = [row for row in range(len(collected.rollouts)) if not collected.rewards.valid[row]]
    assert [failure.row for failure in collected.rewards.failures] == failed
    assert rft.legal(state)


def test_collected_groups_are_trained_on_like_any_rollouts(begun: State) -> None:
    state = rft.refresh(begun)
    collected = rft.collect_groups(state, batches(taken=[]), MANY, by_beginning, rft.Wanted(groups=2, bound=50))
    rollouts = collected.rollouts
    scored = rft.compute_old_logprobs(state, rollouts)
    experience = rft.experience(rollouts, collected.rewards.values, torch.ones(rollouts.tokens.shape) * rollouts.sampled)
    _, history = rft.update(scored, experience, rft.grpo(), Cut())
    assert history[0]["ratio_mean"] == 1.0


def test_at_the_bound_too_few_groups_are_an_error_or_all_there_is(begun: State) -> None:
    state = rft.refresh(begun)
    taken = list[int]()
    with pytest.raises(rft.TooFewGroups, match=r"after 2 batches of prompts .* of 40 groups are missing .*at_bound='take'"):
        _ = rft.collect_groups(state, batches(taken=taken), MANY, by_beginning, rft.Wanted(groups=40, bound=2))
    assert taken == [0, 1]
    some = rft.collect_groups(state, batches(taken=[]), MANY, by_beginning, rft.Wanted(groups=40, bound=2, at_bound="take"))
    assert 0 < len(teaching(some)) < 40
    none = rft.collect_groups(state, batches(taken=[]), MANY, lambda _: 1.0, rft.Wanted(groups=1, bound=2, at_bound="take"))
    assert len(none.rollouts) == 0


def test_prompts_that_come_again_get_other_responses(begun: State) -> None:
    state, seen = rft.refresh(begun), list[str]()
    wanted = rft.Wanted(groups=1, bound=2, at_bound="take")
    _ = rft.collect_groups(state, itertools.repeat(PROMPTS), MANY, lambda sample: seen.append(sample.response) or 1.0, wanted)
    half = len(seen) // 2
    assert seen[:half] != seen[half:]


def test_a_prompt_that_is_kept_is_not_kept_again(begun: State) -> None:
    wanted = rft.Wanted(groups=4, bound=6, at_bound="take")
    collected = rft.collect_groups(rft.refresh(begun), itertools.repeat(PROMPTS), MANY, by_beginning, wanted)
    counts = collected.rollouts.groups.unique(return_counts=True)[1]
    assert counts.tolist() == [MANY.samples] * len(counts)
    assert len(counts) <= 3


@pytest.mark.parametrize("given", [torch.ones(2, dtype=torch.bool), torch.ones(12), [True] * 12])
def test_what_does_not_say_of_each_row_whether_it_is_kept_is_refused(begun: State, given: Any) -> None:
    wanted = rft.Wanted(groups=1, bound=1, keep=lambda _: given)
    with pytest.raises(rft.ShapeError, match=r"a bool for each of the 12 rows"):
        _ = rft.collect_groups(rft.refresh(begun), iter([PROMPTS]), MANY, by_beginning, wanted)


def test_a_group_of_which_some_rows_are_kept_is_refused(begun: State) -> None:
    wanted = rft.Wanted(groups=1, bound=1, keep=lambda collected: torch.arange(len(collected.rollouts)) % MANY.samples > 0)
    with pytest.raises(rft.BadInput, match=r"all rows of a group or none, .* it parted group 0, 3 in all"):
        _ = rft.collect_groups(rft.refresh(begun), iter([PROMPTS]), MANY, by_beginning, wanted)


def test_what_fails_while_it_says_which_rows_are_kept_fails_the_call(begun: State) -> None:
    state = rft.refresh(begun)
    with pytest.raises(ZeroDivisionError):
        _ = rft.collect_groups(state, iter([PROMPTS]), MANY, by_beginning, rft.Wanted(groups=1, bound=1, keep=lambda _: 1 / 0))  # pyright: ignore[reportArgumentType]
    assert "generate" in rft.legal(state)


def test_a_list_of_batches_is_refused(begun: State) -> None:
    with pytest.raises(rft.BadInput, match=r"must be an iterator, got list; write iter\(batches\)"):
        _ = rft.collect_groups(rft.refresh(begun), typing.cast(Any, [PROMPTS]), MANY, by_beginning, rft.Wanted(groups=1, bound=1))


def test_prompts_that_end_and_wants_that_cannot_be_met_are_refused(begun: State) -> None:
    state = rft.refresh(begun)
    with pytest.raises(rft.BadInput, match="no prompts left"):
        _ = rft.collect_groups(state, iter([PROMPTS]), MANY, lambda _: 1.0, rft.Wanted(groups=1, bound=2))
    for wrong, says in (({"groups": 0}, "at least 1"), ({"at_bound": "stop"}, "at least 1"), ({"groups": 1.5}, "must be int, got 1.5")):
        with pytest.raises(rft.BadInput, match=says):
            _ = rft.Wanted(**{"groups": 1, "bound": 1, **wrong})

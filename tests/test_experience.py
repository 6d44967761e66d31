import dataclasses as dc
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

import rft
from rft.engines.protocol import Request
from rft.errors import BadInput, ShapeError
from rft.parallel.seeds import seed_of
from rft.testing import SAMPLING, scripted_devices, scripted_launch, scripted_minibatch, scripted_prompts
from tests.refusals import State, sampled, trained, with_old
from tests.rollouts import rollouts as made


@pytest.fixture
def ready() -> Iterator[State]:
    with scripted_launch(seed=3) as begun:
        yield rft.refresh(begun)


def rollouts_of(**changes: Any) -> rft.Rollouts:
    """Two rows of five tokens: a prompt of two and a response of three; a prompt of one and a response of two."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    sampled = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]).bool()
    usual: dict[str, Any] = {
        "batch": rft.BatchId("b"),
        "tokens": torch.arange(10).view(2, 5),
        "mask": mask,
        "sampled": sampled,
        "logprobs": torch.where(sampled, -1.0, 0.0),
        "versions": torch.where(sampled, 4, -1),
        "groups": torch.tensor([7, 8]),
        "samples": torch.tensor([0, 0]),
        "finish": ("length", "stop"),
        "questions": ("q", "r"),
        "responses": ("x", "y"),
        "answers": ("1", "2"),
        "sampling": rft.Sampling(),
        "version": 4,
    }
    return rft.Rollouts(**{**usual, **changes})


def experience_of(rollouts: rft.Rollouts) -> rft.Experience:
    rewards = torch.arange(len(rollouts), dtype=torch.float32)
    return rft.experience(rollouts, rewards, rewards[:, None] * rollouts.sampled)


def some_images() -> rft.Images:
    return rft.Images(pixels=torch.randn(4, 6), grids=torch.tensor([[1, 2, 2]]))


# ---- images ----


def test_images_go_with_their_rows_and_are_never_copied() -> None:
    one, two = some_images(), some_images()
    first, second = rollouts_of(images=(one, None)), rollouts_of(batch=rft.BatchId("c"), images=(two, two))
    joined = rft.assemble((first, torch.tensor([1, 0])), (second, torch.tensor([1])), (rollouts_of(), torch.tensor([0])))
    assert joined.images is not None
    assert all(got is expected for got, expected in zip(joined.images, (None, one, two, None), strict=True))
    both = rft.concatenate(experience_of(first), experience_of(rollouts_of()), experience_of(second))
    taken = rft.take(both, torch.tensor([5, 2, 0])).images
    assert taken is not None
    assert all(got is expected for got, expected in zip(taken, (two, None, one), strict=True))
    assert next(rft.minibatches(both, rft.Cut())).images is not None


def test_rows_without_images_have_no_column_of_them() -> None:
    first = rollouts_of(images=(some_images(), None))
    assert rft.assemble((first, torch.tensor([1]))).images is None
    assert rft.take(experience_of(first), torch.tensor([1])).images is None
    assert rft.concatenate(experience_of(rollouts_of())).images is None


def test_a_column_of_images_has_all_rows() -> None:
    with pytest.raises(ShapeError, match=r"Rollouts\.images has 1 entries for 2 rows"):
        rollouts_of(images=(some_images(),))
    with pytest.raises(ShapeError, match=r"Experience\.images has 3 entries for 2 rows"):
        dc.replace(experience_of(rollouts_of()), images=(None,) * 3)


def test_images_are_refused_by_a_model_of_text(ready: State) -> None:
    prompts = dc.replace(scripted_prompts(2), images=(None, some_images()))
    with pytest.raises(BadInput, match="prompt 1 of rank 0: it has images, and scripted is a model of text alone"):
        _ = rft.generate(ready, prompts, SAMPLING)
    assert len(rft.generate(ready, scripted_prompts(2), SAMPLING)) == 2 * SAMPLING.samples


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": torch.zeros(2, 5)}, "Rollouts.tokens has dtype float32"),
        ({"tokens": torch.zeros(2, 4, dtype=torch.int64)}, "Rollouts.mask: axis 'seq' is 5, but 4 in Rollouts.tokens"),
        ({"logprobs": torch.zeros(2, 5, dtype=torch.bfloat16)}, "Rollouts.logprobs has dtype bfloat16"),
        ({"groups": torch.zeros(3, dtype=torch.int64)}, "Rollouts.groups: axis 'batch' is 3"),
        ({"versions": torch.zeros(10, dtype=torch.int64)}, "Rollouts.versions has shape (10,)"),
        ({"finish": ("stop",)}, "Rollouts.finish has 1 entries for 2 rows"),
        ({"responses": ()}, "Rollouts.responses has 0 entries for 2 rows"),
        ({"sampled": torch.ones(2, 5, dtype=torch.bool)}, "Rollouts.sampled marks tokens that Rollouts.mask calls padding"),
    ],
)
def test_rollouts_hold_together(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ShapeError) as caught:
        _ = rollouts_of(**changes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mask": torch.ones(2, 3)}, "Prompts.mask has dtype float32"),
        ({"ids": torch.arange(3)}, "Prompts.ids: axis 'prompt' is 3, but 2 in Prompts.tokens"),
        ({"texts": ("one",)}, "Prompts.texts has 1 entries for 2 rows"),
        ({"answers": ()}, "Prompts.answers has 0 entries for 2 rows"),
    ],
)
def test_prompts_hold_together(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ShapeError) as caught:
        _ = dc.replace(scripted_prompts(2), **changes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"epoch": "a"}, "Prompts.epoch must be int, got 'a'"),
        ({"texts": ("one", None)}, r"Prompts.texts must be tuple\[str, ...\], got \('one', None\)"),
        ({"answers": (3, "two")}, "Prompts.answers must be"),
    ],
)
def test_prompts_are_of_texts(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        _ = dc.replace(scripted_prompts(2), **changes)


def test_an_id_is_of_one_prompt() -> None:
    with pytest.raises(BadInput, match=r"Prompts.ids: 1, 7 come more than once, .*Sampling\(samples=…\)"):
        _ = dc.replace(scripted_prompts(6), ids=torch.tensor([7, 1, 2, 1, 7, 7]))


def test_rewards_and_advantages_fit_their_rollouts() -> None:
    rollouts = rollouts_of()
    with pytest.raises(ShapeError, match=r"Experience.rewards: axis 'batch' is 3"):
        _ = rft.experience(rollouts, torch.ones(3), torch.ones(2, 5))
    with pytest.raises(ShapeError, match=r"Experience.advantages has shape \(2,\)"):
        _ = rft.experience(rollouts, torch.ones(2), torch.ones(2))
    with pytest.raises(ShapeError, match="origin names a batch beyond the 1 in batches"):
        _ = dc.replace(experience_of(rollouts), origin=torch.tensor([0, 1]))


# ---- joining and taking ----


def test_the_version_of_an_assembled_batch_is_the_oldest_of_what_is_in_it() -> None:
    newer = rollouts_of(versions=torch.tensor([[-1, -1, 6, 6, 6], [-1, 6, 6, -1, -1]]), version=6)
    none, both = torch.zeros(0, dtype=torch.int64), torch.arange(2)
    assert rft.assemble((rollouts_of(), both), (newer, both)).version == 4
    assert rft.assemble((rollouts_of(), none), (newer, both)).version == 6, "nothing is in it of the older one"
    assert rft.assemble((rollouts_of(), none), (newer, none)).version == 4


def test_no_token_is_older_than_the_version() -> None:
    with pytest.raises(ShapeError, match=r"Rollouts\.versions has older ones than Rollouts\.version, which is 5"):
        _ = rollouts_of(version=5)


def test_an_experience_is_its_rollouts_row_by_row() -> None:
    rollouts = rollouts_of()
    experience = experience_of(rollouts)
    assert len(experience) == 2
    assert experience.batches == ("b",)
    assert (experience.origin.tolist(), experience.rows.tolist()) == ([0, 0], [0, 1])
    assert experience.tokens is rollouts.tokens
    assert experience.temperature.tolist() == [rollouts.sampling.temperature] * 2
    assert experience.demonstrated.tolist() == [False, False]
    assert experience.reference is None


def test_concatenating_pads_on_the_right_and_keeps_where_rows_come_from() -> None:
    long = experience_of(rollouts_of())
    cut = {name: getattr(rollouts_of(), name)[1:, :3] for name in ("tokens", "mask", "sampled", "logprobs", "versions")}
    columns = {"groups": torch.tensor([9]), "samples": torch.tensor([0])}
    texts: dict[str, Any] = dict.fromkeys(("questions", "responses", "answers"), ("z",))
    short = experience_of(rollouts_of(batch=rft.BatchId("c"), finish=("stop",), **cut, **columns, **texts))
    joined = rft.concatenate(short, long, short)
    assert joined.batches == ("c", "b")
    assert joined.origin.tolist() == [0, 1, 1, 0]
    assert joined.rows.tolist() == [0, 0, 1, 0]
    assert joined.tokens.tolist() == [[5, 6, 7, 0, 0], [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]
    assert joined.mask.sum(1).tolist() == [3, 5, 3, 3]
    again = rft.concatenate(joined, long)
    assert again.batches == ("c", "b")
    assert again.origin.tolist() == [0, 1, 1, 0, 1, 1]


def test_rows_keep_the_temperature_that_they_were_sampled_at() -> None:
    cold = experience_of(rollouts_of(batch=rft.BatchId("c"), sampling=rft.Sampling(temperature=0.5)))
    assert rft.concatenate(experience_of(rollouts_of()), cold).temperature.tolist() == [1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize("tokens", [[[1, 2]], torch.zeros(3, dtype=torch.int64), torch.tensor(1), None])
def test_demonstrations_of_what_is_no_tensor_of_rows_are_refused(tokens: Any) -> None:
    with pytest.raises(rft.BadInput, match=r"tokens must be a tensor \[batch, seq\] of whole numbers"):
        _ = rft.demonstrations(tokens, torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool))


def test_demonstrations_are_joined_to_rollouts() -> None:
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8]])
    shown = rft.demonstrations(tokens, tokens > 0, tokens > 4)
    rollouts = rollouts_of()
    own = rft.experience(rollouts, torch.ones(2), torch.ones(2, 5), reference=torch.full((2, 5), -3.0))
    joined = rft.concatenate(own, shown)
    assert joined.demonstrated.tolist() == [False, False, True]
    assert joined.batches == (rollouts.batch, "demonstrations")
    assert joined.tokens[2].tolist() == tokens[0].tolist()
    assert joined.sampled[2].tolist() == [False, False, True, True, True, True]
    assert joined.temperature.tolist() == [1.0] * 3
    assert joined.reference is not None
    assert joined.reference[:, 0].tolist() == [-3.0, -3.0, 0.0]
    assert rft.concatenate(shown, shown).reference is None


def test_concatenating_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(BadInput, match="at least one"):
        _ = rft.concatenate()
    with_reference = rft.experience(rollouts_of(), torch.ones(2), torch.ones(2, 5), reference=torch.zeros(2, 5))
    with pytest.raises(BadInput, match="Reference's log-probs"):
        _ = rft.concatenate(with_reference, experience_of(rollouts_of()))
    with pytest.raises(ShapeError, match=r"Experience\.reference"):
        _ = rft.experience(rollouts_of(), torch.ones(2), torch.ones(2, 5), reference=torch.zeros(2, 4))


def test_taking_rows_keeps_their_order_and_their_origin() -> None:
    taken = rft.take(experience_of(rollouts_of()), torch.tensor([1, 0, 1]))
    assert type(taken) is rft.Minibatch
    assert taken.rows.tolist() == [1, 0, 1]
    assert taken.groups.tolist() == [8, 7, 8]
    assert taken.rewards.tolist() == [1.0, 0.0, 1.0]
    assert len(rft.take(taken, torch.tensor([], dtype=torch.int64))) == 0


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (torch.tensor([0, 2]), "there is no row 2; source has 2 rows"),
        (torch.tensor([-1]), "there is no row -1"),
        (torch.tensor([True, False]), r"int64.* got \(2,\) of torch.bool"),
        ([0], "got list"),
    ],
)
def test_rows_that_are_not_there_cannot_be_taken(rows: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        _ = rft.take(experience_of(rollouts_of()), rows)


def test_what_is_of_another_kind_is_told_what_makes_one() -> None:
    rollouts: Any = rollouts_of()
    with pytest.raises(BadInput, match=r"source must be Experience, got Rollouts; experience\(rollouts, rewards, advantages\) makes one"):
        _ = rft.take(rollouts, torch.tensor([0]))
    with pytest.raises(BadInput, match="each of parts must be Experience, got Rollouts"):
        _ = rft.concatenate(rollouts)
    with pytest.raises(BadInput, match="rollouts must be Rollouts, got list"):
        _ = rft.experience(cast(Any, [rollouts]), torch.ones(2), torch.ones(2, 5))
    with pytest.raises(ShapeError, match=r"Experience\.rewards must be a tensor"):
        _ = rft.experience(rollouts, cast(Any, [1.0, 1.0]), torch.ones(2, 5))


def test_rows_of_several_rollouts_are_assembled_to_rollouts_of_their_own() -> None:
    long = rollouts_of()
    cut = {name: getattr(long, name)[1:, :3] for name in ("tokens", "mask", "sampled", "logprobs", "versions")}
    columns = {"groups": torch.tensor([9]), "samples": torch.tensor([0])}
    texts: dict[str, Any] = dict.fromkeys(("questions", "responses", "answers"), ("z",))
    short = rollouts_of(batch=rft.BatchId("c"), finish=("stop",), **cut, **columns, **texts)
    both = rft.assemble((short, torch.tensor([0])), (long, torch.tensor([1])))
    assert both.tokens.tolist() == [[5, 6, 7, 0, 0], long.tokens[1].tolist()]
    assert both.versions[0, 3:].tolist() == [-1, -1]
    assert (both.groups.tolist(), both.questions) == ([9, int(long.groups[1])], ("z", long.questions[1]))
    assert both.batch not in (long.batch, short.batch)
    assert both.batch == rft.assemble((short, torch.tensor([0])), (long, torch.tensor([1]))).batch
    assert both.batch != rft.assemble((short, torch.tensor([0])), (long, torch.tensor([0]))).batch
    for wrong in ((), ((long, torch.tensor([0])), (rollouts_of(sampling=rft.Sampling(top_k=3)), torch.tensor([0])))):
        with pytest.raises(BadInput, match="sampled in one way"):
            _ = rft.assemble(*wrong)


# ---- token in, token out ----


def test_rollouts_are_the_prompts_tokens_and_then_the_sampled_ones_and_nothing_else(ready: State) -> None:
    prompts, engine = scripted_prompts(3), scripted_devices(ready).engine
    assert engine is not None
    rollouts = rft.generate(ready, prompts, SAMPLING)
    assert len(rollouts) == 6
    for row in range(6):
        prompt = prompts.tokens[row // 2][prompts.mask[row // 2]].tolist()
        request = Request(tokens=tuple(prompt), seed=seed_of(run=3, epoch=0, prompt=row // 2, draw=0, sample=row % 2))
        (completion,) = engine.generate([request], SAMPLING)
        response, finish = list(completion.tokens), completion.finish
        length = len(prompt) + len(response)
        assert rollouts.tokens[row, :length].tolist() == prompt + response
        assert rollouts.tokens[row, length:].tolist() == [0] * (rollouts.tokens.shape[1] - length)
        assert rollouts.mask[row].nonzero()[:, 0].tolist() == list(range(length))
        assert rollouts.sampled[row].nonzero()[:, 0].tolist() == list(range(len(prompt), length))
        assert rollouts.finish[row] == finish
        assert rollouts.responses[row] == " ".join(map(str, response))
    assert rollouts.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert rollouts.samples.tolist() == [0, 1] * 3
    assert rollouts.questions == tuple(f"question {row // 2}" for row in range(6))
    assert torch.equal(rollouts.versions, torch.where(rollouts.sampled, 0, -1))
    assert not rollouts.logprobs[~rollouts.sampled].any()


def test_a_response_that_was_cut_off_has_no_end_that_it_never_sampled(ready: State) -> None:
    rollouts = rft.generate(ready, scripted_prompts(60), SAMPLING)
    assert set(rollouts.finish) == {"stop", "length"}
    for row, finish in enumerate(rollouts.finish):
        response = rollouts.tokens[row][rollouts.sampled[row]].tolist()
        assert (response[-1] == 0) == (finish == "stop")
        assert finish == "stop" or len(response) == SAMPLING.max_new_tokens


def test_prompts_may_have_gaps_or_padding_on_the_left(ready: State) -> None:
    right = scripted_prompts(1)
    left = dc.replace(right, tokens=torch.tensor([[9, *right.tokens[0].tolist()]]), mask=torch.tensor([[False, True, True]]))
    one, other = (rft.generate(ready, prompts, SAMPLING) for prompts in (right, left))
    assert torch.equal(one.tokens, other.tokens)


def test_no_prompts_give_no_rows(ready: State) -> None:
    prompts = scripted_prompts(1)
    none = rft.Prompts(tokens=prompts.tokens[:0], mask=prompts.mask[:0], ids=prompts.ids[:0], epoch=0, texts=(), answers=())
    assert rft.generate(ready, none, SAMPLING).tokens.shape == (0, 0)


@pytest.mark.parametrize("change", ["run", "epoch", "prompt", "draw", "sample"])
def test_a_seed_changes_with_each_of_its_numbers(change: str) -> None:
    numbers = {"run": 1, "epoch": 2, "prompt": 3, "draw": 4, "sample": 5}
    assert seed_of(**numbers) == seed_of(**numbers)
    assert seed_of(**numbers) != seed_of(**{**numbers, change: 11})


def test_seeds_are_not_confused_by_neighbouring_digits() -> None:
    assert seed_of(run=1, epoch=12, prompt=3, draw=0, sample=0) != seed_of(run=11, epoch=2, prompt=3, draw=0, sample=0)
    assert 0 <= seed_of(run=0, epoch=0, prompt=0, draw=0, sample=0) < 1 << 63


def test_samples_are_the_same_again_and_another_draw_or_epoch_gives_others(ready: State) -> None:
    prompts = scripted_prompts(4)
    first, again = (rft.generate(ready, prompts, SAMPLING) for _ in range(2))
    assert torch.equal(first.tokens, again.tokens)
    assert first.batch != again.batch
    for other in (rft.generate(ready, prompts, SAMPLING, draw=1), rft.generate(ready, scripted_prompts(4, epoch=1), SAMPLING)):
        assert other.tokens.shape != first.tokens.shape or not torch.equal(other.tokens, first.tokens)


def test_a_prompts_samples_do_not_depend_on_what_it_is_sampled_with(ready: State) -> None:
    both = rft.generate(ready, scripted_prompts(2), SAMPLING)
    alone = rft.generate(ready, scripted_prompts(1), SAMPLING)
    width = alone.tokens.shape[1]
    assert torch.equal(both.tokens[:2, :width] * both.mask[:2, :width], alone.tokens)


def test_versions_follow_the_weights_that_were_sampled_from() -> None:
    with scripted_launch() as begun:
        state, rollouts = with_old(begun)
        state = trained(state, rollouts)
        assert rft.generate_stale(state, scripted_prompts(), SAMPLING, max_lag=1).version == 0
        assert sampled(rft.broadcast(state)).version == 1


def test_batches_of_two_launches_are_never_taken_for_each_other() -> None:
    names = set[str]()
    for _ in range(3):
        with scripted_launch() as begun:
            names.add(sampled(rft.refresh(begun)).batch)
    assert len(names) == 3


def test_old_logprobs_are_joined_by_batch_and_row(ready: State) -> None:
    seen: list[torch.Tensor] = []

    def objective(new: rft.TokenScores, micro: rft.MicroBatch, totals: rft.Totals) -> rft.LossTerms:
        assert micro.old is not None
        seen.append(torch.where(micro.rows.sampled, micro.old - new.logprobs.detach(), 0.0))
        return rft.grpo()(new, micro, totals)

    parts = (rft.generate(ready, scripted_prompts(2), SAMPLING), rft.generate(ready, scripted_prompts(1), SAMPLING, draw=1))
    mixed = rft.concatenate(*(rft.experience(r, torch.ones(len(r)), torch.ones(r.tokens.shape)) for r in parts))
    state = rft.compute_old_logprobs(ready, *parts)
    state, _ = rft.train_step(state, rft.take(mixed, torch.tensor([5, 2, 0, 4])), objective)
    assert torch.equal(seen[0], torch.zeros_like(seen[0])), "at the first step of a batch the ratio is 1"
    _ = rft.train_step(state, scripted_minibatch(parts[1]), objective)
    assert seen[1].any()


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (None, "a part is a pair"),
        ((None, torch.tensor([0])), "the first of each pair must be Rollouts"),
        ([0], "int64 tensor of one axis"),
        (torch.tensor([0.0]), "int64 tensor of one axis"),
        (torch.tensor(0), "int64 tensor of one axis"),
        (torch.tensor([True, False]), "int64 tensor of one axis"),
        (torch.tensor([-1]), "rows -1 to -1 asked for"),
        (torch.tensor([0, 9]), "rows 0 to 9 asked for, of rollouts with 2"),
    ],
)
def test_parts_that_are_none_are_refused(part: Any, says: str) -> None:
    given = part if part is None or isinstance(part, tuple) else (made("a", "b"), part)
    with pytest.raises(BadInput, match=says):
        _ = rft.assemble(given)

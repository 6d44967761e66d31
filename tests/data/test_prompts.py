import dataclasses as dc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rft.data.prompts import Cursor, Dataset, Share, all_prompts, next_prompts, tokenise
from rft.data.questions import Question
from rft.errors import BadInput
from rft.testing.models import tiny_tokenizer


def questions(count):
    return tuple(Question(id=100 + n, text=f"What is {n} + {n * n}?", answer=str(n + n * n)) for n in range(count))


def dataset(count):
    return Dataset(questions=questions(count), tokens=tuple((n + 1,) * (n % 4 + 1) for n in range(count)))


def test_a_prompt_is_the_rendered_template_token_by_token():
    tokenizer = tiny_tokenizer()
    data = tokenise(questions(3), tokenizer, max_tokens=200, system="Be brief.")
    assert tokenizer.decode(data.tokens[2]) == "system: Be brief.\nuser: What is 2 + 4?\nassistant: "
    assert tokenizer.decode(tokenise(questions(1), tokenizer, max_tokens=200).tokens[0]) == "user: What is 0 + 0?\nassistant: "


def test_records_are_padded_on_the_right_and_keep_texts_and_ids():
    prompts, _ = next_prompts(dataset(4), Cursor(), 4, Share())
    rows = [tokens[mask].tolist() for tokens, mask in zip(prompts.tokens, prompts.mask, strict=True)]
    for number, text, answer, row in zip(prompts.ids.tolist(), prompts.texts, prompts.answers, rows, strict=True):
        n = number - 100
        assert row == [n + 1] * (n % 4 + 1)
        assert text == f"What is {n} + {n * n}?"
        assert answer == str(n + n * n)
    assert not prompts.tokens[~prompts.mask].any()


def test_too_long_a_prompt_is_named():
    long = Question(id=7, text="x" * 50, answer="1")
    with pytest.raises(BadInput, match=r"question 7 is 68 tokens long .* max_tokens=60: 'xxx"):
        tokenise([*questions(1), long], tiny_tokenizer(), max_tokens=60)


def test_what_cannot_be_a_data_set():
    tokenizer = tiny_tokenizer()
    with pytest.raises(BadInput, match="has no questions"):
        tokenise([], tokenizer, max_tokens=9)
    with pytest.raises(BadInput, match="two questions of the same id"):
        tokenise([*questions(2), *questions(1)], tokenizer, max_tokens=99)
    with pytest.raises(BadInput, match="max_tokens must be at least 1"):
        tokenise(questions(1), tokenizer, max_tokens=0)
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="no chat template"):
        tokenise(questions(1), tokenizer, max_tokens=99)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_tokens": "64"}, "tokenise: max_tokens must be int, got '64'"),
        ({"system": 3}, r"tokenise: system must be str \| None, got 3"),
        ({"system": "\ud800"}, "tokenise: system has half of a surrogate pair"),
        ({"questions": "What is 1 + 1?"}, r"the data set must be a sequence of Question\(id=…, .*, got 'What is"),
        ({"questions": [*questions(1), "and 2?"]}, "the data set must be a sequence of Question"),
    ],
)
def test_arguments_of_another_kind(changes, says):
    with pytest.raises(BadInput, match=says):
        tokenise(**{"questions": questions(1), "tokenizer": tiny_tokenizer(), "max_tokens": 64, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"text": "half \ud800"}, r"question 7: its text has half of a surrogate pair, .*'half \\ud800'"),
        ({"id": 2**70}, "Question.id must fit in 64 bits, got 1180591620717411303424; number the questions from 0"),
        ({"id": -(2**63) - 1}, "Question.id must fit in 64 bits"),
        ({"id": True}, "Question.id must be int, got True"),
    ],
)
def test_what_cannot_be_a_question(changes, says):
    with pytest.raises(BadInput, match=says):
        Question(**{"id": 7, "text": "What?", "answer": "1", **changes})


def test_ids_may_be_any_of_64_bits():
    ends = [Question(id=n, text="What?", answer="1") for n in (-(2**63), 2**63 - 1)]
    data = tokenise(ends, tiny_tokenizer(), max_tokens=64)
    assert all_prompts(data, Share()).ids.tolist() == [-(2**63), 2**63 - 1]


def test_a_template_that_refuses_the_messages_is_told():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(BadInput, match="question 100: the tokenizer's chat template fails on it: System role not supported; set"):
        tokenise(questions(1), tokenizer, max_tokens=64, system="Be brief.")


def walk(data, count, ranks, last, batches, seed=0):
    """The ids that each rank sees, batch by batch, with the epochs."""
    cursors, seen = [Cursor(seed=seed)] * ranks, []
    for _ in range(batches):
        steps = [next_prompts(data, cursor, count, Share(index=r, count=ranks), last=last) for r, cursor in enumerate(cursors)]
        cursors = [cursor for _, cursor in steps]
        assert len(set(cursors)) == 1
        seen.append(([prompts.ids.tolist() for prompts, _ in steps], {prompts.epoch for prompts, _ in steps}))
    return seen


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["keep", "drop"]), st.integers(0, 3))
def test_an_epoch_gives_every_question_at_most_once(size, count, ranks, last, seed):
    whole = count * ranks
    if last == "drop" and whole > size:
        with pytest.raises(BadInput, match="cannot be taken from"):
            walk(dataset(size), count, ranks, last, 1)
        return
    per_epoch = size // whole if last == "drop" else -(-size // whole)
    seen = walk(dataset(size), count, ranks, last, 2 * per_epoch + 1, seed)
    assert [epoch for _, epoch in seen] == [{0}] * per_epoch + [{1}] * per_epoch + [{2}]
    for epoch in (0, 1):
        ids = [i for shares, _ in seen[epoch * per_epoch : (epoch + 1) * per_epoch] for share in shares for i in share]
        assert len(set(ids)) == len(ids) == (size if last == "keep" else per_epoch * whole)
    for shares, _ in seen:
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert last == "keep" or set(sizes) == {count}


def test_the_same_questions_whatever_the_number_of_ranks():
    one = walk(dataset(24), 4, 1, "drop", 9)
    two = walk(dataset(24), 2, 2, "drop", 9)
    four = walk(dataset(24), 1, 4, "drop", 9)
    assert [{*s[0]} for s, _ in one] == [{*s[0], *s[1]} for s, _ in two] == [{i for r in s for i in r} for s, _ in four]


def test_epochs_differ_and_the_seed_decides():
    data = dataset(30)
    first, second = (next_prompts(data, Cursor(seed=5, epoch=e), 30, Share())[0].ids.tolist() for e in (0, 1))
    assert first != second
    assert first == next_prompts(data, Cursor(seed=5), 30, Share())[0].ids.tolist()
    assert first != next_prompts(data, Cursor(seed=6), 30, Share())[0].ids.tolist()


def test_the_cursor_alone_says_where_to_go_on():
    data, share = dataset(10), Share()
    straight = walk(data, 3, 1, "keep", 8)
    cursor = Cursor()
    for expected, _ in straight:
        cursor = Cursor(**dc.asdict(cursor))
        prompts, cursor = next_prompts(data, cursor, 3, share, last="keep")
        assert prompts.ids.tolist() == expected[0]


def test_a_share_of_all_prompts():
    data = dataset(7)
    shares = [all_prompts(data, Share(index=r, count=3)) for r in range(3)]
    assert [len(s) for s in shares] == [3, 2, 2]
    assert sorted(i for s in shares for i in s.ids.tolist()) == [100 + n for n in range(7)]
    assert len(all_prompts(dataset(1), Share(index=1, count=2))) == 0


@pytest.mark.parametrize(
    "call", [lambda: Share(index=2, count=2), lambda: Share(index=-1), lambda: Cursor(epoch=-1), lambda: Share(count=2.0)]
)
def test_places_that_are_none(call):
    with pytest.raises(BadInput):
        call()


@pytest.mark.parametrize(("count", "last"), [(0, "keep"), (-1, "drop"), (3, "wrap"), (2.0, "keep")])
def test_counts_and_modes_that_cannot_work(count, last):
    with pytest.raises(BadInput):
        next_prompts(dataset(5), Cursor(), count, Share(), last=last)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((None, Cursor(), 1, Share()), r"data must be Dataset, got NoneType; tokenise\("),
        ((dataset(3), None, 1, Share()), r"cursor must be Cursor, got NoneType; write Cursor\(\) to begin"),
        ((dataset(3), Cursor(), 1, 0), r"share must be Share, got int; write Share\(\)"),
    ],
)
def test_places_of_another_kind(given, says):
    with pytest.raises(BadInput, match=rf"next_prompts\(data, cursor, count, share\): {says}"):
        next_prompts(*given)

"""What is no answer to a request is told, whatever engine gave it."""

import dataclasses as dc
from typing import Any

import pytest

from rft.engines.answers import check_completions
from rft.engines.protocol import Completion, Request
from rft.errors import EngineFailed
from rft.sampling import Sampling

ASKED = [Request(tokens=(1, 2), seed=0), Request(tokens=(3,), seed=1)]
GOOD = Completion(tokens=(4, 9), logprobs=(-0.5, 1e-7), finish="length")
SAMPLING = Sampling(max_new_tokens=2)


def test_answers_are_given_on() -> None:
    assert check_completions([GOOD, GOOD], ASKED, SAMPLING, vocab=10) == [GOOD, GOOD]
    assert check_completions((), [], SAMPLING, vocab=10) == []


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (None, "NoneType for 2 requests"),
        ([GOOD], "1 completions for 2 requests"),
        ([GOOD] * 3, "3 completions for 2 requests"),
        ([GOOD, "text"], "completion 1 of 2 is str"),
    ],
)
def test_one_completion_for_each_request(answers: Any, says: str) -> None:
    with pytest.raises(EngineFailed, match=says):
        _ = check_completions(answers, ASKED, SAMPLING, vocab=10)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": (), "logprobs": ()}, "has 0 tokens; from 1 to max_new_tokens=2"),
        ({"tokens": (1, 2, 3), "logprobs": (-1.0,) * 3}, "has 3 tokens"),
        ({"logprobs": (-1.0,)}, "has 1 log-probs for 2 tokens"),
        ({"tokens": (-1, 2)}, "has tokens from -1 to 2"),
        ({"tokens": (1, 10)}, "outside of the vocabulary of 10"),
        ({"logprobs": (-1.0, 3.0)}, r"log-probs that are none: .3.0."),
        ({"logprobs": (-1.0, float("nan"))}, "log-probs that are none: .nan."),
        ({"logprobs": (float("-inf"), -1.0)}, "log-probs that are none: .-inf."),
        ({"finish": "abort"}, "for the reason 'abort'"),
    ],
)
def test_what_cannot_be_a_response(change: dict[str, Any], says: str) -> None:
    with pytest.raises(EngineFailed, match=f"completion 1 of 2 .*{says}"):
        _ = check_completions([GOOD, dc.replace(GOOD, **change)], ASKED, SAMPLING, vocab=10)

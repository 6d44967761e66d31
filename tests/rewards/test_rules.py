import sys
from decimal import Decimal

import pytest

from rft.errors import BadInput
from rft.rewards.rules import find_last_number, last_number, math_answer
from rft.rewards.scoring import Sample


def sample(response, answer):
    return Sample(question="q", response=response, answer=answer, finish="stop", tokens=1)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12 + 30 = 42", "42"),
        ("The answer is **42**.", "42"),
        ("50-20", "20"),
        ("x = -7", "-7"),
        ("x = −7", "-7"),
        ("$1,234.50.", "1234.50"),
        ("1,2,3", "3"),
        ("1,234,56", "56"),
        ("4.0", "4"),
        ("3.14.", "3.14"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number(text, number):
    assert find_last_number(text) == (None if number is None else Decimal(number))


def test_last_number_rewards_the_right_one_alone():
    assert last_number(sample("12 + 30 = 42", "42")) == 1.0
    assert last_number(sample("42 is 12 + 30", "42")) == 0.0
    assert last_number(sample("", "42")) == 0.0
    with pytest.raises(BadInput, match="has no number"):
        last_number(sample("42", "forty-two"))


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"so it is \boxed{18}", "18", 1.0),
        ("She makes 9 * 2 = 18 dollars. The answer is 18.", "18", 1.0),
        ("The answer is $18", "18", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 17.", "18", 0.0),
        ("I do not know", "18", 0.0),
    ],
)
def test_math_answer(response, answer, right):
    assert math_answer()(sample(response, answer)) == right


def test_math_answer_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(BadInput, match="pip install"):
        math_answer()

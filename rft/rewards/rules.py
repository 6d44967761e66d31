"""Rewards by rule: the response is right, or it is not."""

import logging
import re
from decimal import Decimal
from typing import Any

from rft.errors import BadInput
from rft.rewards.scoring import RewardFunction, Sample

_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def find_last_number(text: str) -> Decimal | None:
    """The last number that `text` names, as 1,234.50 or −7; None where there is none. The minus of "9-4" belongs to no number."""
    found = _NUMBER.findall(text.replace("−", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def last_number(sample: Sample) -> float:
    """1 where the last number of the response equals the reference answer, else 0. Raises `BadInput` for an answer that is none."""
    expected = find_last_number(sample.answer)
    if expected is None:
        raise BadInput(f"the reference answer {sample.answer!r} of {sample.question!r} has no number in it")
    return float(find_last_number(sample.response) == expected)


def math_answer() -> RewardFunction:
    """A reward that is 1 where the response's final answer equals the reference, as mathematics (1/2 is 0.5), else 0.

    It reads the last boxed expression or number by the package math-verify, https://github.com/huggingface/Math-Verify. Raises
    `BadInput` with the line that installs it where it is missing.
    """
    try:
        import math_verify
    except ImportError as error:
        raise BadInput("math_answer needs the package math-verify: pip install 'rft-runtime[gsm8k]'") from error
    library: Any = math_verify
    # Its own timeouts are signals, which only a main thread may set; `score` has a deadline, so its warnings of that are noise.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def reward(sample: Sample) -> float:
        expected = library.parse(sample.answer, parsing_timeout=None)
        if not expected:
            raise BadInput(f"the reference answer {sample.answer!r} of {sample.question!r} is no mathematics")
        return float(library.verify(expected, library.parse(sample.response, parsing_timeout=None), timeout_seconds=None))

    return reward

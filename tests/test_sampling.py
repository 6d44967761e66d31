from typing import Any

import pytest

import rft
from rft.errors import BadInput


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 1e-6},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_k": True},
        {"first": 1.5},
        {"first": rft.Sampling(stop=("x",))},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"max_new_tokens": 1.5},
        {"samples": 2.0},
        {"samples": True},
        {"max_new_tokens": True},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"stop": "text"},
        {"stop": ("",)},
        {"stop": ("\ud800",)},
        {"stop_tokens": [3]},
        {"stop_tokens": (-1,)},
    ],
)
def test_sampling_refuses_what_cannot_work(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(wrong))):
        _ = rft.Sampling(**wrong)

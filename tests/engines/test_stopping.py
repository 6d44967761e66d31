"""Stop strings, with the tokenizer of the tiny models: every byte is a token."""

import pytest

from rft.engines.protocol import Completion
from rft.engines.stopping import StopStrings
from rft.testing.models import SPECIAL, tiny_tokenizer

PAD, END, TEXTLESS = 256, 257, 300


def completion(*tokens: int) -> Completion:
    return Completion(tokens=tokens, logprobs=tuple(-float(i) for i in range(len(tokens))), finish="length")


def of(text: str) -> list[int]:
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        ("so: 42. And", (".",), "so: 42."),
        ("so: 42. And", ("And", "42"), "so: 42"),
        ("so: 42. And", ("nowhere",), None),
        ("ab", ("ab",), "ab"),
        ("é42 → done", ("→",), "é42 →"),
        ("</answer> and more", ("</answer>",), "</answer>"),
        ("anything", (), None),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(text: str, stops: tuple[str, ...], left: str | None) -> None:
    tokens, strings = of(text), StopStrings(tiny_tokenizer(), stops)
    cut = strings.cut(completion(*tokens))
    if left is None:
        assert cut == completion(*tokens)
        assert not any(strings.reached(tokens[:end]) for end in range(1, len(tokens) + 1))
    else:
        assert (cut.tokens, cut.finish) == (tuple(of(left)), "stop")
        assert len(cut.logprobs) == len(cut.tokens)
        assert next(end for end in range(1, len(tokens) + 1) if strings.reached(tokens[:end])) == len(cut.tokens)


def test_tokens_without_text_neither_end_nor_hide_a_string() -> None:
    assert SPECIAL == ("<|pad|>", "<|end|>")
    strings = StopStrings(tiny_tokenizer(), ("ok", "<|end|>"))
    o, k = of("ok")
    hidden = [o, *[TEXTLESS, PAD] * 20, k]
    assert strings.reached(hidden)
    assert not strings.reached(hidden[:-1])
    assert strings.cut(completion(*hidden, END, o)).tokens == tuple(hidden)
    assert strings.cut(completion(o, END)) == completion(o, END)

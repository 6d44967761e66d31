"""Stop strings: where a response's text first contains one, the same for every engine."""

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

from rft.engines.protocol import Completion


class StopStrings:
    """Knows when the tokens of a response, as text without special tokens, contain one of some strings.

    The token that completes the string is the last one of the response, with all of its text.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._special, self._known = frozenset(tokenizer.all_special_ids), len(tokenizer)
        # Any other token has a byte of text at least; four more, since the first one of a window may be part of a character.
        self._window = max((len(string.encode()) for string in strings), default=0) + 4

    def __bool__(self) -> bool:
        return bool(self._strings)

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether the last one of these tokens completes a stop string, if none before it does."""
        return bool(self._strings) and self._contained([t for t in tokens if t < self._known and t not in self._special][-self._window :])

    def cut(self, completion: Completion) -> Completion:
        """The completion up to its first stop string; itself where it has none."""
        tokens = completion.tokens
        if not self._strings or not self._contained(tokens):
            return completion
        end = next(end for end in range(1, len(tokens) + 1) if self._contained(tokens[:end]))
        return dc.replace(completion, tokens=tokens[:end], logprobs=completion.logprobs[:end], finish="stop")

    def _contained(self, tokens: Sequence[int]) -> bool:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)

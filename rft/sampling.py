"""How responses are drawn, and why they end."""

import dataclasses as dc
import math
from typing import ClassVar, Literal

from rft.errors import BadInput
from rft.shapes import check_fields

COLDEST = 1e-4
"""Lowest temperature but 0. Below, engines take it for 0 or run out of numbers, each at another one."""
Finish = Literal["stop", "length"]
"""Why a response ended: `stop`, by an end token or a stop string, whose tokens are part of it; `length`, it was cut off."""


@dc.dataclass(frozen=True, kw_only=True)
class Draw:
    """How one token is drawn.

    The distribution is softmax(logits / temperature), cut to the `top_k` most likely tokens (0: all) and to those that are at least `min_p`
    times as likely as the likeliest one, then to the smallest set whose mass of these reaches `top_p`, renormalised. Temperature 0 is
    greedy; its log-probs are those at temperature 1.

    Source of `min_p`: Nguyen et al., Turning Up the Heat, https://arxiv.org/abs/2407.01082
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Mass of the nucleus; 1 keeps everything."""
    top_k: int = 0
    """Tokens kept; 0 keeps everything."""
    min_p: float = 0.0
    """Least probability of a token, as a share of the likeliest one's; 0 keeps everything."""

    def __post_init__(self) -> None:
        check_fields(self, but=("stop", "stop_tokens"))
        if 0 < self.temperature < COLDEST:
            raise BadInput(f"temperature must be 0, which is greedy, or at least {COLDEST:g}, got {self.temperature}; engines differ below")
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.min_p <= 1:
            raise BadInput(
                "temperature must be a number of at least 0, top_p in (0, 1], top_k at least 0, min_p in [0, 1]; "
                f"got {self.temperature}, {self.top_p}, {self.top_k}, {self.min_p}"
            )


@dc.dataclass(frozen=True, kw_only=True)
class Sampling(Draw):
    """How responses are drawn: every token by the same `Draw`, or the first one by another.

    With `first`, the first token is drawn hot and the others as usual (FIRE): responses differ from their beginning on and stay
    sound. Its log-prob is recorded under the distribution that it was drawn from; the Actor is trained and scored at `temperature`
    throughout, so with computed old log-probs a correction (`ops.corrections`) sees the first token for what it is.

    Source: Chen et al., Flaming-hot Initiation with Regular Execution Sampling for Large Language Models, https://arxiv.org/abs/2410.21236
    """

    made_by: ClassVar[str] = "write Sampling(temperature=…)"

    samples: int = 1
    """Responses per prompt."""
    max_new_tokens: int = 128
    """Longest response, in tokens."""
    first: Draw | None = None
    """How the first token of a response is drawn; None: as all others."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, in addition to the model's end tokens; the token that completes one is its last."""
    stop_tokens: tuple[int, ...] = ()
    """Ids that end a response, in addition to the model's end tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1 or self.max_new_tokens < 1:
            raise BadInput(f"samples and max_new_tokens must be at least 1, got {self.samples} and {self.max_new_tokens}")
        if isinstance(self.first, Sampling):
            raise BadInput("first is about one token: write first=Draw(temperature=…), not a Sampling")
        if type(self.stop) is not tuple or not all(type(text) is str and text and is_text(text) for text in self.stop):
            raise BadInput(f"stop must be a tuple of texts that are not empty, got {self.stop!r}; write stop=('…',)")
        if type(self.stop_tokens) is not tuple or not all(type(token) is int and token >= 0 for token in self.stop_tokens):
            raise BadInput(f"stop_tokens must be a tuple of token ids, got {self.stop_tokens!r}; write stop_tokens=(id,)")


def is_text(text: str) -> bool:
    """Whether a model can read or say it: half of a surrogate pair it cannot."""
    return text.encode(errors="ignore").decode() == text

"""What every answer of an engine is held to, the library's own and those of others, before anything is made of it."""

import math
from collections.abc import Sequence

from rft.engines.protocol import Completion, Request
from rft.errors import EngineFailed
from rft.sampling import Sampling

ROUNDING = 1e-3
"""Nats that a log-prob may be above 0."""


def check_completions(completions: object, requests: Sequence[Request], sampling: Sampling, *, vocab: int | None) -> list[Completion]:
    """The completions, one for each request. Raises `EngineFailed` that names the first one that cannot be an answer to its request.

    `vocab` is the size of the vocabulary; None: it is not known.
    """
    if not isinstance(completions, list | tuple) or len(completions) != len(requests):
        given = f"{len(completions)} completions" if isinstance(completions, list | tuple) else type(completions).__name__
        raise EngineFailed(f"the engine gave {given} for {len(requests)} requests; it must give a list with one Completion for each")
    for number, completion in enumerate(completions):
        if wrong := _wrong(completion, sampling, vocab):
            raise EngineFailed(f"the engine's completion {number} of {len(requests)} {wrong}")
    return list(completions)


def _wrong(completion: object, sampling: Sampling, vocab: int | None) -> str | None:
    if not isinstance(completion, Completion):
        return f"is {type(completion).__name__}, and must be a Completion"
    tokens, logprobs = completion.tokens, completion.logprobs
    if not 1 <= len(tokens) <= sampling.max_new_tokens:
        return f"has {len(tokens)} tokens; from 1 to max_new_tokens={sampling.max_new_tokens} were asked for"
    if len(logprobs) != len(tokens):
        return f"has {len(logprobs)} log-probs for {len(tokens)} tokens"
    if min(tokens) < 0 or (vocab is not None and max(tokens) >= vocab):
        return f"has tokens from {min(tokens)} to {max(tokens)}, outside of the vocabulary of {vocab}"
    if not all(map(math.isfinite, logprobs)) or max(logprobs) > ROUNDING:
        wrong = [number for number in logprobs if not number <= ROUNDING or math.isinf(number)][:4]
        return f"has log-probs that are none: {wrong}; look at the Actor's weights: they may not be finite"
    if completion.finish not in ("stop", "length"):
        return f"ended for the reason {completion.finish!r}; 'stop' and 'length' are known"
    return None

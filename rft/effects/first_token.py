"""Responses whose first token is drawn in another way than the rest, on any engine: in two rounds."""

import dataclasses as dc
from collections.abc import Sequence

from rft.engines.answers import check_completions
from rft.engines.protocol import Completion, Engine, Request
from rft.parallel.seeds import continued
from rft.sampling import Draw, Sampling


def generate(engine: Engine, requests: Sequence[Request], sampling: Sampling, vocab: int | None) -> list[Completion]:
    """One completion per request, in order. With `sampling.first` the engine is asked twice: for one token, then for the rest.

    The second round has random numbers of its own, from the same seed. A response that its first token ended has no second round.
    Raises `EngineFailed` for what is no answer in a vocabulary of that size (None: unknown).
    """

    def asked(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return check_completions(engine.generate(requests, sampling), requests, sampling, vocab=vocab)

    if sampling.first is None:
        return asked(requests, sampling)
    openings = asked(requests, _once(sampling.first, sampling.stop_tokens))
    open_ones = [i for i, opening in enumerate(openings) if opening.finish == "length" and sampling.max_new_tokens > 1]
    if not open_ones:
        return openings
    rest = dc.replace(sampling, first=None, max_new_tokens=sampling.max_new_tokens - 1)
    ends = dict(zip(open_ones, asked([_after(requests[i], openings[i]) for i in open_ones], rest), strict=True))
    return [_joined(opening, ends[i]) if i in ends else opening for i, opening in enumerate(openings)]


def _once(draw: Draw, stop_tokens: tuple[int, ...]) -> Sampling:
    drawn = {field.name: getattr(draw, field.name) for field in dc.fields(Draw)}
    return Sampling(**drawn, stop_tokens=stop_tokens, max_new_tokens=1)


def _after(request: Request, opening: Completion) -> Request:
    return dc.replace(request, tokens=(*request.tokens, *opening.tokens), seed=continued(request.seed))


def _joined(opening: Completion, end: Completion) -> Completion:
    return Completion(tokens=(*opening.tokens, *end.tokens), logprobs=(*opening.logprobs, *end.logprobs), finish=end.finish)

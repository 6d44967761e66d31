import dataclasses as dc

import pytest
import torch

import rft
from rft.effects import first_token
from rft.engines.protocol import Completion, Request
from rft.parallel.seeds import continued
from rft.sampling import Draw, Sampling
from rft.testing import scripted_launch, scripted_prompts

SAMPLING = Sampling(temperature=0.5, top_p=0.9, max_new_tokens=5, first=Draw(temperature=8.0, top_k=3))


class Recorder:
    """Answers with tokens that tell the round; requests of an odd seed end with their first token."""

    def __init__(self) -> None:
        self.rounds: list[tuple[list[Request], Sampling]] = []

    def generate(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        self.rounds.append((requests, sampling))
        return [self._answer(request, sampling.max_new_tokens, len(self.rounds)) for request in requests]

    def _answer(self, request: Request, count: int, round_: int) -> Completion:
        ends = request.seed % 2 == 1 and round_ == 1
        return Completion(tokens=(round_ * 10,) * count, logprobs=(-float(round_),) * count, finish="stop" if ends else "length")


ASKED = [Request(tokens=(1, 2), seed=4), Request(tokens=(3,), seed=7), Request(tokens=(5, 6, 7), seed=10)]


def test_the_first_token_is_drawn_by_itself_and_the_rest_as_usual() -> None:
    engine = Recorder()
    completions = first_token.generate(engine, ASKED, SAMPLING, None)
    (opening, once), (rest, usual) = engine.rounds
    assert opening == ASKED
    assert once == Sampling(temperature=8.0, top_k=3, max_new_tokens=1)
    assert usual == Sampling(temperature=0.5, top_p=0.9, max_new_tokens=4)
    assert rest == [Request(tokens=(1, 2, 10), seed=continued(4)), Request(tokens=(5, 6, 7, 10), seed=continued(10))]
    assert completions[0] == Completion(tokens=(10, 20, 20, 20, 20), logprobs=(-1.0, -2.0, -2.0, -2.0, -2.0), finish="length")
    assert completions[1] == Completion(tokens=(10,), logprobs=(-1.0,), finish="stop")


def test_one_token_has_no_second_round() -> None:
    engine = Recorder()
    assert [c.tokens for c in first_token.generate(engine, ASKED, dc.replace(SAMPLING, max_new_tokens=1), None)] == [(10,)] * 3
    assert len(engine.rounds) == 1


def test_without_it_the_engine_is_asked_once() -> None:
    engine, plain = Recorder(), dc.replace(SAMPLING, first=None)
    _ = first_token.generate(engine, ASKED, plain, None)
    assert engine.rounds == [(ASKED, plain)]


def test_what_is_no_draw_is_refused() -> None:
    with pytest.raises(rft.BadInput, match=r"Sampling\.first must be Draw"):
        _ = Sampling(first=8.0)
    with pytest.raises(rft.BadInput, match="top_k"):
        _ = Draw(top_k=-1)


def test_a_token_that_ends_responses_ends_a_first_one_too() -> None:
    engine = Recorder()
    _ = first_token.generate(engine, ASKED, dc.replace(SAMPLING, first=Draw(temperature=3.0, min_p=0.1), stop_tokens=(9,)), None)
    (_, once), (_, usual) = engine.rounds
    assert once == Sampling(temperature=3.0, min_p=0.1, stop_tokens=(9,), max_new_tokens=1)
    assert usual.stop_tokens == (9,)


@pytest.mark.parametrize("first", [None, Draw(temperature=8.0)])
def test_a_text_ends_a_response_wherever_it_begins(first: Draw | None) -> None:
    """Also in the first token, which the second round sees as a part of the prompt."""
    with scripted_launch() as state:
        ready, sampling = rft.wake(rft.broadcast(state)), Sampling(max_new_tokens=6, first=first)
        whole = rft.generate(ready, scripted_prompts(), sampling)
        row = int(whole.sampled.sum(1).argmax())
        first_two = " ".join(whole.responses[row].split(" ")[:2])
        cut = rft.generate(ready, scripted_prompts(), dc.replace(sampling, stop=(first_two,)))
    assert (cut.responses[row], cut.finish[row]) == (first_two, "stop")
    assert int(whole.sampled[row].sum()) > int(cut.sampled[row].sum()) == 2
    assert torch.equal(cut.logprobs[row][cut.sampled[row]], whole.logprobs[row][whole.sampled[row]][:2])

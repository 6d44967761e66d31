"""What every engine that takes images must do, against transformers' own forward pass in fp32.

    from rft.testing.engines.seeing import SeeingContract, folder, module, other

with a fixture `engine` as for `EngineContract`: of `folder`'s model, which takes images here. Every test finds it awake, with its weights.
"""

import dataclasses as dc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rft.effects import first_token
from rft.engines.protocol import Engine, Request
from rft.errors import BadInput
from rft.images import Images
from rft.sampling import Draw, Sampling
from rft.testing.engines.oracle import distribution, is_close, wake_with, weights
from rft.testing.models import prompt_of, some_images, tiny_vision_model

END = 257
GREEDY = Sampling(temperature=0, max_new_tokens=5)


def requests() -> list[Request]:
    """Two samples of a prompt with an image, the same tokens with another image, text, a prompt with two images, text again."""
    draw = torch.Generator().manual_seed(0)
    one, same, two = some_images(draw, (1, 4, 4)), some_images(draw, (1, 4, 4)), some_images(draw, (1, 2, 4), (1, 6, 8))
    first, text, double = (tuple(prompt_of(draw, images)) for images in (one, None, two))
    rows = ((first, one), (first, one), (first, same), (text, None), (double, two), (text, None))
    return [Request(tokens=tokens, images=images, seed=seed) for seed, (tokens, images) in enumerate(rows)]


@torch.no_grad()
def logits(module: Any, request: Request, response: tuple[int, ...]) -> Tensor:
    """By the model itself, all at once; its positions and the places of features are its own."""
    tokens = torch.tensor([request.tokens + response])
    images, placeholders = request.images, (tokens == module.config.image_token_id).int()
    needed = 0 if images is None else int(images.grids.prod(dim=1).sum()) // 4
    if placeholders.sum() > needed:
        return with_sampled_placeholders(module, request, tokens, needed)[len(request.tokens) - 1 :]
    shown = {} if images is None else {"pixel_values": images.pixels, "image_grid_thw": images.grids}
    return module(input_ids=tokens, mm_token_type_ids=placeholders, use_cache=False, **shown).logits[0, len(request.tokens) - 1 :]


def with_sampled_placeholders(module: Any, request: Request, tokens: Tensor, needed: int) -> Tensor:
    """The same where the model would take what it has sampled itself for one more image: only the first `needed` placeholders are any."""
    embeddings, images = module.get_input_embeddings()(tokens)[0], request.images
    kinds = torch.zeros_like(tokens)
    kinds[0, (tokens[0] == module.config.image_token_id).nonzero()[:needed, 0]] = 1
    if images is not None:
        features = module.model.get_image_features(images.pixels, images.grids).pooler_output
        embeddings[kinds[0] == 1] = torch.cat(tuple(features))
    positions, _ = module.model.get_rope_index(tokens, kinds, None if images is None else images.grids)
    return module(inputs_embeds=embeddings[None], position_ids=positions, use_cache=False).logits[0]


def expected_logprobs(module: Any, request: Request, response: tuple[int, ...], sampling: Sampling) -> list[float]:
    table = [distribution(row, sampling) for row in logits(module, request, response)[:-1]]
    return [float(row[token]) for row, token in zip(table, response, strict=True)]


def greedy(module: Any, request: Request, count: int) -> tuple[int, ...]:
    response: tuple[int, ...] = ()
    while len(response) < count and END not in response:
        response += (int(logits(module, request, response)[-1].argmax()),)
    return response


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def module(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model with other weights."""
    return AutoModelForImageTextToText.from_pretrained(
        tiny_vision_model(tmp_path_factory.mktemp("other"), seed=1), dtype=torch.float32
    ).eval()


def stored(module: Any) -> dict[str, Tensor]:
    """What a trainer sends, by the names of a checkpoint."""
    return {name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): t for name, t in weights(module).items()}


class SeeingContract:
    """See the module's head."""

    @pytest.fixture(autouse=True)
    def _awake(self, engine: Engine, module: Any) -> None:
        wake_with(engine, module, stored(module))

    def test_greedy_is_the_models_own(self, engine: Engine, module: Any) -> None:
        asked = requests()
        tokens = [c.tokens for c in engine.generate(asked, GREEDY)]
        assert tokens == [greedy(module, request, 5) for request in asked]
        assert tokens[0] == tokens[1] != tokens[2]  # an image says something

    @pytest.mark.parametrize(
        "sampling", [Sampling(max_new_tokens=12), Sampling(temperature=1.7, top_k=40, top_p=0.8, max_new_tokens=8)], ids=str
    )
    def test_logprobs_are_the_models_own(self, engine: Engine, module: Any, sampling: Sampling) -> None:
        asked = requests()
        for request, completion in zip(asked, engine.generate(asked, sampling), strict=True):
            assert is_close(completion.logprobs, expected_logprobs(module, request, completion.tokens, sampling), 1e-5)

    def test_a_placeholder_that_was_sampled_is_a_token_like_others(self, engine: Engine, module: Any) -> None:
        asked = [dc.replace(request, tokens=(*request.tokens, module.config.image_token_id, 5)) for request in requests()]
        for request, completion in zip(asked, engine.generate(asked, GREEDY), strict=True):
            assert is_close(completion.logprobs, expected_logprobs(module, request, completion.tokens, GREEDY), 1e-5)

    def test_rows_do_not_depend_on_their_company(self, engine: Engine) -> None:
        asked = requests()
        together = engine.generate(asked, Sampling(max_new_tokens=12))
        assert [engine.generate([request], Sampling(max_new_tokens=12))[0].tokens for request in asked] == [c.tokens for c in together]
        assert [c.tokens for c in engine.generate(asked[::-1], Sampling(max_new_tokens=12))][::-1] == [c.tokens for c in together]

    def test_a_first_token_drawn_otherwise_keeps_the_images(self, engine: Engine, module: Any) -> None:
        sampling = Sampling(temperature=0, max_new_tokens=4, first=Draw(temperature=3.0))
        for request, completion in zip(requests(), first_token.generate(engine, requests(), sampling, None), strict=True):
            start, rest = completion.tokens[:1], completion.tokens[1:]
            after = dc.replace(request, tokens=request.tokens + start)
            assert rest == (greedy(module, after, 3) if start != (END,) else ())

    def test_new_weights_of_the_vision_tower_are_used(self, engine: Engine, module: Any, other: Any) -> None:
        """The images have just been seen, with the old ones."""
        _ = engine.generate(requests(), GREEDY)
        before, new = engine.checksums(), stored(other)
        assert engine.load(iter(new.items())) == engine.checksums()
        assert before.keys() >= engine.checksums().keys()
        engine.flush()
        assert [c.tokens for c in engine.generate(requests(), GREEDY)] == [greedy(other, request, 5) for request in requests()]
        old = stored(module)
        tower = {name: new[name] if name.startswith("visual.") else tensor for name, tensor in old.items()}
        _ = engine.load(iter(tower.items()))
        engine.flush()
        changed = engine.generate(requests(), GREEDY)
        _ = engine.load(iter(old.items()))
        engine.flush()
        again = engine.generate(requests(), GREEDY)
        assert [a.tokens == b.tokens for a, b in zip(changed, again, strict=True)] == [request.images is None for request in requests()]

    def test_sleep_and_wake(self, engine: Engine, module: Any) -> None:
        first = engine.generate(requests(), GREEDY)
        for _ in range(2):
            wake_with(engine, module, stored(module))
            assert engine.generate(requests(), GREEDY) == first

    def test_text_is_scored(self, engine: Engine, module: Any) -> None:
        text = next(request for request in requests() if request.images is None)
        expected = expected_logprobs(module, dc.replace(text, tokens=text.tokens[:1]), text.tokens[1:], Sampling())
        assert is_close(engine.score([text.tokens])[0], expected, 1e-5)

    def test_requests_that_cannot_be_served(self, engine: Engine) -> None:
        one, _, _, text, two, _ = requests()
        wrong = {
            "runs of 4 placeholders": dc.replace(text, images=one.images),
            "runs of 2, 12": dc.replace(one, images=two.images),
            "have 5 numbers": dc.replace(one, images=Images(pixels=torch.zeros(16, 5), grids=torch.tensor([[1, 4, 4]]))),
            "do not divide": dc.replace(one, images=Images(pixels=torch.zeros(16, 384), grids=torch.tensor([[1, 1, 16]]))),
        }
        for says, request in wrong.items():
            with pytest.raises(BadInput, match=f"request 1: .*{says}"):
                _ = engine.generate([text, request], GREEDY)

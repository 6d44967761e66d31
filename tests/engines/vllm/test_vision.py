"""vLLM with images, on its CPU build."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rft.data.prompts import tokenise
from rft.data.questions import Question
from rft.engines.vllm import VLLM, build
from rft.models import find_model
from rft.parallel.world import open_world
from rft.spec import VLLMEngine
from rft.testing.engines.seeing import SeeingContract, folder, module, other

__all__ = ["folder", "module", "other"]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VLLM]:
    spec = VLLMEngine(dtype="float32", max_model_len=256, max_rows=16, cache_bytes=1 << 26)
    engine = build(spec, find_model(str(folder)), open_world(1, timeout_s=60))
    yield engine
    engine.close()


class TestSeeing(SeeingContract):
    """All of it."""


def test_new_weights_go_by_the_plan(engine: VLLM) -> None:
    assert engine.sync_path == "plan"


def test_prompts_are_those_of_the_models_own_processor(folder: Path, tmp_path: Path) -> None:
    """Placeholders and pixels: what vLLM would have made of text and images."""
    from transformers import AutoProcessor

    files = [str(tmp_path / name) for name in ("one.png", "two.png")]
    for file, size in zip(files, ((60, 40), (90, 130)), strict=True):
        Image.effect_noise(size, 80).convert("RGB").save(file)
    found = find_model(str(folder))
    question = Question(id=0, text="Which is larger?", answer="2", images=tuple(files))
    data = tokenise([question], found.tokenizer, max_tokens=200, images=found.images)
    processor: Any = AutoProcessor.from_pretrained(folder)
    text = "user: " + 2 * "<|vision_start|><|image_pad|><|vision_end|>" + "Which is larger?\nassistant: "
    made = processor(text=[text], images=[Image.open(file) for file in files], return_tensors="pt")
    assert list(data.tokens[0]) == made["input_ids"][0].tolist()
    assert found.images is not None
    assert found.images.process(files).pixels.equal(made["pixel_values"])

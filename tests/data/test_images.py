"""Prompts with images, from files to records."""

import copy
import dataclasses as dc
from pathlib import Path
from typing import Any, cast

import pytest
from PIL import Image

from rft.data.images import ImageReader
from rft.data.prompts import Cursor, Share, all_prompts, next_prompts, tokenise
from rft.data.questions import Question
from rft.errors import BadInput
from rft.models import ModelFolder, find_model
from rft.testing.models import tiny_vision_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return find_model(str(tiny_vision_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
def questions(tmp_path: Path) -> list[Question]:
    """About one image, about none, and about two; the first is 64 × 32 pixels, the other 32 × 32."""
    wide, square = (str(tmp_path / name) for name in ("wide.png", "square.png"))
    Image.new("RGB", (64, 32), (200, 0, 0)).save(wide)
    Image.new("L", (32, 32), 90).save(square)
    files = ((wide,), (), (square, wide))
    return [Question(id=n, text=f"question {n}", answer=str(n), images=images) for n, images in enumerate(files)]


def reader(model: ModelFolder) -> ImageReader:
    assert model.images is not None
    return model.images


def test_each_image_has_its_placeholders_before_the_text(model: ModelFolder, questions: list[Question]) -> None:
    # 8 × 8 pixels a patch and four patches a placeholder: 8 of them for 64 × 32 pixels, and 4 for 32 × 32.
    data = tokenise(questions, model.tokenizer, max_tokens=200, images=model.images)
    text = [model.tokenizer.decode(tokens) for tokens in data.tokens]
    image = {count: "<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>" for count in (4, 8)}
    assert text[0] == f"user: {image[8]}question 0\nassistant: "
    assert text[1] == "user: question 1\nassistant: "
    assert text[2] == f"user: {image[4]}{image[8]}question 2\nassistant: "


def test_a_batch_is_processed_once_for_each_prompt(model: ModelFolder, questions: list[Question]) -> None:
    calls: list[int] = []

    class Counted:
        def __call__(self, images: list[Any], **options: Any) -> Any:
            calls.append(len(images))
            return reader(model).processor(images=images, **options)

        get_number_of_image_patches = staticmethod(reader(model).processor.get_number_of_image_patches)

    data = tokenise(questions, model.tokenizer, max_tokens=200, images=dc.replace(reader(model), processor=Counted()))
    assert calls == []
    prompts = all_prompts(data, Share())
    assert calls == [1, 2]
    assert prompts.images is not None
    one, none, two = prompts.images
    assert none is None
    assert one is not None
    assert two is not None
    assert one.grids.tolist() == [[1, 4, 8]]
    assert two.grids.tolist() == [[1, 4, 4], [1, 4, 8]]
    assert two.pixels[16:].equal(one.pixels)


def test_a_batch_of_text_alone_has_no_images(model: ModelFolder, questions: list[Question]) -> None:
    data = tokenise(questions[1:2], model.tokenizer, max_tokens=200, images=model.images)
    assert next_prompts(data, Cursor(), 1, Share())[0].images is None


def test_what_is_refused(model: ModelFolder, questions: list[Question], tmp_path: Path) -> None:
    broken, cut = str(tmp_path / "broken.png"), str(tmp_path / "cut.png")
    Path(broken).write_text("no image")
    Path(cut).write_bytes(Path(questions[0].images[0]).read_bytes()[:60])
    thin = str(tmp_path / "thin.png")
    Image.new("RGB", (900, 3)).save(thin)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"images": (str(tmp_path / "none.png"),)}, "question 0: the image .*none.png cannot be read"),
        ({"images": (broken,)}, "question 0: the image .*broken.png cannot be read"),
        ({"images": (cut,)}, "question 0: the image .*cut.png cannot be read"),
        ({"images": (thin,)}, "question 0: the image .*thin.png, 900 × 3, is refused by the model's image processor"),
        ({"images": questions[0].images * 24}, "question 0 is 268 tokens long as a prompt, more than max_tokens=200.*fewer or smaller"),
        ({"text": "an <|image_pad|>"}, r"question 0: the chat template makes 2 placeholders \(token 260\) of 1 images"),
    ]
    for change, says in wrong:
        with pytest.raises(BadInput, match=says):
            tokenise([dc.replace(questions[0], **change)], model.tokenizer, max_tokens=200, images=model.images)
    lost = r"question 1: it has placeholders of images \(token 260\), and no images; .* take what stands for them out"
    with pytest.raises(BadInput, match=lost):
        _ = tokenise([dc.replace(questions[1], text="an <|image_pad|>")], model.tokenizer, max_tokens=200, images=model.images)
    with pytest.raises(BadInput, match=r"Question\.images must be"):
        _ = dc.replace(questions[0], images=cast(Any, "a.png"))
    with pytest.raises(BadInput, match="question 0 has images, and the model takes none"):
        tokenise(questions, model.tokenizer, max_tokens=200)


def test_a_template_of_text_alone_is_told(model: ModelFolder, questions: list[Question]) -> None:
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"
    with pytest.raises(BadInput, match=r"question 0: the tokenizer's chat template fails on it: .* images as parts of a message"):
        _ = tokenise(questions, tokenizer, max_tokens=200, images=model.images)


def test_a_file_that_changes_is_found_out(model: ModelFolder, questions: list[Question]) -> None:
    data = tokenise(questions, model.tokenizer, max_tokens=200, images=model.images)
    Image.new("RGB", (64, 64)).save(questions[0].images[0])
    with pytest.raises(BadInput, match="question 0: its images need 16 placeholders, and its prompt was given 8"):
        all_prompts(data, Share())


def test_a_folder_without_an_image_processor(tmp_path: Path) -> None:
    (tiny_vision_model(tmp_path) / "preprocessor_config.json").unlink()
    with pytest.raises(BadInput, match="takes images, and has no image processor that can be loaded"):
        find_model(str(tmp_path))

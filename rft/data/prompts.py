"""From questions to batches of tokenised prompts, by an explicit cursor.

A cursor counts questions of the whole job, not of one rank. It is the same on every rank, it is saved with the run, and it means
the same place when the run goes on with another number of ranks.
"""

import dataclasses as dc
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Int64
from jinja2 import TemplateError
from torch import Tensor

from rft.data.images import ImageReader
from rft.data.questions import Last, Question, check_last, check_questions, shuffled
from rft.errors import BadInput
from rft.experience import Prompts
from rft.images import Images, unmatched
from rft.sampling import is_text
from rft.shapes import check_fields, require_hint, require_kind


@dc.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Questions with their prompts, tokenised once; `tokens[i]` belongs to `questions[i]`, and has the placeholders of its images."""

    made_by: ClassVar[str] = "tokenise(questions, tokenizer, max_tokens=…) makes one"

    questions: tuple[Question, ...]
    tokens: tuple[tuple[int, ...], ...]
    images: ImageReader | None = None
    """Processes the images of a prompt when a batch has it: of a large data set they would not fit in memory."""

    def __len__(self) -> int:
        return len(self.questions)


@dc.dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of every batch is one rank's: part `index` of `count`."""

    made_by: ClassVar[str] = "write Share(), or Share(index=…, count=…) on several ranks"

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.index < self.count:
            raise BadInput(f"Share.index must be from 0 to below count, got {self.index} of {self.count}")


@dc.dataclass(frozen=True, kw_only=True)
class Cursor:
    """The place in the data: `position` questions of the shuffled epoch `epoch` have been given, over all ranks."""

    made_by: ClassVar[str] = "write Cursor() to begin"

    seed: int = 0
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.epoch < 0 or self.position < 0:
            raise BadInput(f"Cursor.epoch and position must be at least 0, got {self.epoch} and {self.position}")


def tokenise(
    questions: Sequence[Question], tokenizer: Any, *, max_tokens: int, system: str | None = None, images: ImageReader | None = None
) -> Dataset:
    """Puts each question into the tokenizer's chat template, with the opening of the reply, and tokenises it.

    `system` is a system message before the question; None leaves that to the template. `images` is what a model that takes some has
    (`find_model(…).images`): every image is read and counted here, and has as many placeholders among the tokens as the model needs.

    Raises `BadInput` where there is no question or no chat template, where a prompt is longer than `max_tokens`, where a question has
    images and the model takes none or the template fails on them, and where an image cannot be read; the message names the question.
    """
    check_questions(questions, "the data set")
    require_hint("tokenise: max_tokens", max_tokens, int)
    require_hint("tokenise: system", system, str | None)
    if max_tokens < 1:
        raise BadInput(f"max_tokens must be at least 1, got {max_tokens}")
    if not is_text(system or ""):
        raise BadInput(f"tokenise: system has half of a surrogate pair, which no model reads; mend it: {system!r:.120}")
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput("the tokenizer has no chat template; take an instruction-tuned model, or set tokenizer.chat_template")
    opening: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    tokens = tuple(_prompt(tokenizer, opening, question, images) for question in questions)
    for question, prompt in zip(questions, tokens, strict=True):
        if len(prompt) > max_tokens:
            smaller = ", make its images fewer or smaller" if question.images else ""
            raise BadInput(
                f"question {question.id} is {len(prompt)} tokens long as a prompt, more than max_tokens={max_tokens}: "
                f"{question.text[:120]!r}; raise the limit{smaller} or leave the question out"
            )
    return Dataset(questions=tuple(questions), tokens=tokens, images=images)


def next_prompts(data: Dataset, cursor: Cursor, count: int, share: Share, *, last: Last = "drop") -> tuple[Prompts, Cursor]:
    """This rank's `count` prompts of the next batch (`count · share.count` questions over all ranks), and the cursor after it.

    Every epoch has its own order, from the cursor's seed. The last batch of an epoch may be partial: `drop` skips it, `keep` gives
    it, dealt out as evenly as it goes, so that a rank may get fewer prompts than another, or none. Raises `BadInput` for what is of
    another kind, for a count below 1, and where `drop` would skip all there is.
    """
    for name, given, kind in (("data", data, Dataset), ("cursor", cursor, Cursor), ("share", share, Share)):
        require_kind("next_prompts(data, cursor, count, share)", name, given, kind)
    check_last(last)
    whole = count * share.count
    if type(count) is not int or count < 1 or (last == "drop" and whole > len(data)):
        raise BadInput(
            f"a batch of count={count!r} prompts on each of {share.count} ranks cannot be taken from {len(data)} questions; "
            "count must be at least 1, and with last='drop' a batch must not be larger than the data set"
        )
    left = len(data) - cursor.position
    if left <= 0 or (last == "drop" and left < whole):
        cursor = dc.replace(cursor, epoch=cursor.epoch + 1, position=0)
    order = shuffled(len(data), "prompts", cursor.seed, cursor.epoch)
    batch = order[cursor.position : cursor.position + whole]
    after = dc.replace(cursor, position=cursor.position + len(batch))
    return _padded(data, batch[share.index :: share.count], cursor.epoch), after


def all_prompts(data: Dataset, share: Share) -> Prompts:
    """This rank's share of the whole data set, in its own order, for measuring. Shares differ by at most one prompt."""
    return _padded(data, torch.arange(share.index, len(data), share.count), epoch=0)


def _prompt(tokenizer: Any, opening: list[dict[str, Any]], question: Question, images: ImageReader | None) -> tuple[int, ...]:
    if question.images and images is None:
        raise BadInput(f"question {question.id} has images, and the model takes none, or tokenise was not given its `images`")
    # Rendered first and tokenised after: what `apply_chat_template` returns when it tokenises has changed between releases.
    text = _rendered(tokenizer, [*opening, _message(question)], question)
    tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if images is None:
        return tokens
    if not question.images:
        if wrong := unmatched(tokens, images.placeholder):
            raise BadInput(f"question {question.id}: {wrong}, or take what stands for them out of its text")
        return tokens
    try:
        return images.expanded(tokens, [images.count(path) for path in question.images])
    except BadInput as error:
        raise BadInput(f"question {question.id}: {error}") from error


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], question: Question) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TypeError, TemplateError) as error:  # what a template raises by itself, and what Jinja raises in it
        raise BadInput(
            f"question {question.id}: the tokenizer's chat template fails on it: {error}; set tokenizer.chat_template to one that takes "
            "images as parts of a message, where it has some, and a system message, where `system` is given"
        ) from error


def _message(question: Question) -> dict[str, Any]:
    """What the user says; of text alone as text, which every template knows."""
    if not question.images:
        return {"role": "user", "content": question.text}
    return {"role": "user", "content": [*({"type": "image"} for _ in question.images), {"type": "text", "text": question.text}]}


def _processed(data: Dataset, question: Question, tokens: Sequence[int]) -> Images | None:
    """The images of one prompt, once for all of its samples."""
    if data.images is None or not question.images:
        return None
    images = data.images.process(question.images)
    needed, there = sum(data.images.placeholder.counts(images)), tokens.count(data.images.placeholder.token)
    if needed != there:
        raise BadInput(
            f"question {question.id}: its images need {needed} placeholders, and its prompt was given {there} when the data set was made; "
            "the files have changed since"
        )
    return images


def _padded(data: Dataset, rows: Int64[Tensor, "prompt"], epoch: int) -> Prompts:
    questions = [data.questions[row] for row in rows.tolist()]
    tokens = [data.tokens[row] for row in rows.tolist()]
    width = max(map(len, tokens), default=0)
    padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in tokens]
    lengths = torch.tensor([len(prompt) for prompt in tokens], dtype=torch.int64)
    images = tuple(_processed(data, question, prompt) for question, prompt in zip(questions, tokens, strict=True))
    return Prompts(
        tokens=torch.tensor(padded, dtype=torch.int64).reshape(len(tokens), width),
        mask=torch.arange(width)[None, :] < lengths[:, None],
        ids=torch.tensor([q.id for q in questions], dtype=torch.int64),
        epoch=epoch,
        texts=tuple(q.text for q in questions),
        answers=tuple(q.answer for q in questions),
        images=images if any(each is not None for each in images) else None,
    )

"""From questions to batches of tokenised prompts, by an explicit cursor.

A cursor counts questions of the whole job, not of one rank. It is the same on every rank, it is saved with the run, and it means
the same place when the run goes on with another number of ranks.
"""

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from rft.data.questions import Last, Question, check_last, check_questions, shuffled
from rft.errors import BadInput
from rft.experience import Prompts


@dc.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Questions with their prompts, tokenised once; `tokens[i]` belongs to `questions[i]`."""

    questions: tuple[Question, ...]
    tokens: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.questions)


@dc.dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of every batch is one rank's: part `index` of `count`."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise BadInput(f"Share.index must be from 0 to below count, got {self.index} of {self.count}")


@dc.dataclass(frozen=True, kw_only=True)
class Cursor:
    """The place in the data: `position` questions of the shuffled epoch `epoch` have been given, over all ranks."""

    seed: int = 0
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.position < 0:
            raise BadInput(f"Cursor.epoch and position must be at least 0, got {self.epoch} and {self.position}")


def tokenise(questions: Sequence[Question], tokenizer: Any, *, max_tokens: int, system: str | None = None) -> Dataset:
    """Puts each question into the tokenizer's chat template, with the opening of the reply, and tokenises it.

    `system` is a system message before the question; None leaves that to the template. Raises `BadInput` where there is no
    question or no chat template, or where a prompt is longer than `max_tokens`; the message names the question.
    """
    check_questions(questions, "the data set")
    if max_tokens < 1:
        raise BadInput(f"max_tokens must be at least 1, got {max_tokens}")
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput("the tokenizer has no chat template; take an instruction-tuned model, or set tokenizer.chat_template")
    opening = [] if system is None else [{"role": "system", "content": system}]
    tokens = tuple(_prompt(tokenizer, [*opening, {"role": "user", "content": q.text}]) for q in questions)
    for question, prompt in zip(questions, tokens, strict=True):
        if len(prompt) > max_tokens:
            raise BadInput(
                f"question {question.id} is {len(prompt)} tokens long as a prompt, more than max_tokens={max_tokens}: "
                f"{question.text[:120]!r}; raise the limit or leave the question out"
            )
    return Dataset(questions=tuple(questions), tokens=tokens)


def next_prompts(data: Dataset, cursor: Cursor, count: int, share: Share, *, last: Last = "drop") -> tuple[Prompts, Cursor]:
    """This rank's `count` prompts of the next batch (`count · share.count` questions over all ranks), and the cursor after it.

    Every epoch has its own order, from the cursor's seed. The last batch of an epoch may be partial: `drop` skips it, `keep` gives
    it, dealt out as evenly as it goes, so that a rank may get fewer prompts than another, or none. Raises `BadInput` for a count
    below 1, and where `drop` would skip all there is.
    """
    check_last(last)
    whole = count * share.count
    if count < 1 or (last == "drop" and whole > len(data)):
        raise BadInput(
            f"a batch of count={count} prompts on each of {share.count} ranks cannot be taken from {len(data)} questions; "
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


def _prompt(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[int, ...]:
    # Rendered first and tokenised after: what `apply_chat_template` returns when it tokenises has changed between releases.
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _padded(data: Dataset, rows: Int64[Tensor, "prompt"], epoch: int) -> Prompts:
    questions = [data.questions[row] for row in rows.tolist()]
    tokens = [data.tokens[row] for row in rows.tolist()]
    width = max(map(len, tokens), default=0)
    padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in tokens]
    lengths = torch.tensor([len(prompt) for prompt in tokens], dtype=torch.int64)
    return Prompts(
        tokens=torch.tensor(padded, dtype=torch.int64).reshape(len(tokens), width),
        mask=torch.arange(width)[None, :] < lengths[:, None],
        ids=torch.tensor([q.id for q in questions], dtype=torch.int64),
        epoch=epoch,
        texts=tuple(q.text for q in questions),
        answers=tuple(q.answer for q in questions),
    )

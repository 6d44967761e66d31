"""Local reward models: decoders with a head of one number, read at the end of each row.

Known as: `…ForSequenceClassification` with one label, and scalar heads saved as `…ForTokenClassification` with one label.
"""

import dataclasses as dc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn
from torch.nn.functional import pad

from rft.errors import BadInput
from rft.experience import Rollouts
from rft.models import Kind, ModelFolder, find_model, reward_kind
from rft.parallel.batches import Layout
from rft.parallel.world import World
from rft.spec import RewardModel
from rft.trainers import hugging_face, packed
from rft.trainers.frozen import Still, on_every_rank
from rft.trainers.inputs import Inputs, inputs, predicting
from rft.trainers.likeness import other_ends, other_tokens
from rft.trainers.loading import on_rank_0
from rft.trainers.protocol import Judge
from rft.trainers.scorer import TOLERANCE, trial

log = logging.getLogger("rft")

SEQUENCE: Kind = "SequenceClassification"
Text = tuple[Int64[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]
"""Tokens as the reward model reads them, and their mask."""


def build(spec: RewardModel, actor: ModelFolder, world: World) -> Judge:
    """Loads the model, and shards it. Collective. Raises `BadInput` on all ranks for one that does not give one number."""
    folder, read = on_every_rank(world, lambda: _found(spec, actor))
    kind = reward_kind(folder.config, str(folder.path))
    root = on_rank_0(
        world,
        lambda: scalar(hugging_face.load(folder, checkpointing=False, kind=kind)),
        lambda layout: bare_scalar(hugging_face.empty(folder, checkpointing=False, kind=kind), layout),
    )
    return LocalJudge(root, spec, read, world)


class LocalJudge(Still):
    """See `Judge`."""

    def __init__(self, root: "Scalar", spec: RewardModel, read: Callable[[Rollouts], Text], world: World) -> None:
        longest: int | None = getattr(root.model.config.get_text_config(), "max_position_embeddings", None)
        self._name, self._read, self._stop, self._longest = spec.model, read, root.stop, longest
        super().__init__(root, spec, world)

    def scores(self, rollouts: Rollouts) -> Float32[Tensor, "batch"]:
        """See `Judge`. NaN for a row that is too long for the model, or has fewer than two tokens; the log says so."""
        self.require_here()
        tokens, mask = on_every_rank(self.passes.world, lambda: self._read(rollouts))
        ends, lengths = ends_of(tokens, mask, self._stop), mask.sum(dim=1)
        fits = lengths <= (self._longest or lengths.max().item()) if len(lengths) else lengths > 0
        readable = ends.any(dim=1) & fits
        for row in (~readable).nonzero()[:, 0].tolist():
            log.warning("reward model %s: row %d has %d tokens, and it reads 2 to %s", self._name, row, lengths[row], self._longest)
        mask, ends = mask & readable[:, None], ends & readable[:, None]
        found = self.passes.first(self.held, tokens, mask, ends, 1.0).sum(dim=1)
        return torch.where(readable, found, torch.nan)


class Scalar(nn.Module):
    """Holds a Hugging Face classifier of one label. A `Root`."""

    def __init__(self, model: Any, layout: Layout = "padded") -> None:
        super().__init__()
        self.model = model
        self.layout: Layout = layout
        self.stop: int | None = None
        """What does not count at a row's end: transformers reads a sequence at its last token that is not the padding one."""
        if type(model).__name__.endswith(SEQUENCE):
            self.stop = model.config.get_text_config().pad_token_id

    def forward(self, asked: Inputs) -> tuple[Float32[Tensor, "wanted"]]:
        """The head's number at each of the tokens asked for, those before it read, in fp32."""
        at = dc.replace(asked, predictors=asked.predictors + 1)  # a token's own state, not the one that predicts it
        return (_head(self.model)(predicting(self.model, at).float()).squeeze(1),)

    def borrowed(self) -> list[nn.Module]:
        """See `Root`."""
        return []

    def exact(self) -> list[nn.Module]:
        """See `Root`."""
        return [_head(self.model)]

    def named(self) -> dict[str, Tensor]:
        """See `Root`."""
        return hugging_face.named_tensors(self.model)


def scalar(model: Any) -> Scalar:
    """The root of a model that lies on the host: tried out on a few tokens, with packed rows where it can take them.

    Raises `BadInput` for a model whose number is not what its head makes of the last hidden state.
    """
    name = type(model).__name__
    if not isinstance(getattr(model, "score", getattr(model, "classifier", None)), nn.Linear):
        raise BadInput(f"{name} has no linear head called score or classifier; a reward model is a decoder with one")
    _ = model.eval()
    made = Scalar(model)
    expected = _by_itself(made)
    if not _near(made, expected):
        raise BadInput(f"{name} does more than to read its head at the last token of a row; this cannot be a reward model")
    made.layout = packed.choose(model, lambda layout: _near(Scalar(model, layout), expected))
    return made


def bare_scalar(model: Any, layout: Layout) -> Scalar:
    """A root in a layout that was found elsewhere; nothing is tried out."""
    if layout == "packed":
        packed.prepare(model)
    return Scalar(model, layout)


def ends_of(tokens: Int64[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"], stop: int | None) -> Bool[Tensor, "batch seq"]:
    """Marks the last token of each row that is not `stop`; none in a row where that is the first or there is none."""
    counts = mask if stop is None else mask & (tokens != stop)
    ends = counts & (counts.flip(1).cumsum(1).flip(1) == 1)
    ends[:, :1] = False
    return ends


# ---- what it reads ----


def own_tokens(rollouts: Rollouts) -> Text:
    """The tokens that were sampled and their prompts', as they are."""
    return rollouts.tokens, rollouts.mask


def anew(tokenizer: Any, rollouts: Rollouts) -> Text:
    """Question and response as text, by another tokenizer: with its chat template if it has one, else as it joins a pair of texts."""
    pairs = zip(rollouts.questions, rollouts.responses, strict=True)
    rows = [torch.tensor(_joined(tokenizer, question, response), dtype=torch.int64) for question, response in pairs]
    width = max(map(len, rows), default=1)
    tokens = torch.stack([pad(row, (0, width - len(row))) for row in rows]) if rows else torch.zeros(0, width, dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return tokens, torch.arange(width) < lengths[:, None]


def _joined(tokenizer: Any, question: str, response: str) -> Sequence[int]:
    if tokenizer.chat_template is None:
        return tokenizer(question, response)["input_ids"]
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
    return tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]


def _found(spec: RewardModel, actor: ModelFolder) -> tuple[ModelFolder, Callable[[Rollouts], Text]]:
    """The folder, and what of the rollouts it is to be given. Raises `BadInput`."""
    folder = find_model(spec.model)
    _ = reward_kind(folder.config, str(folder.path))
    apart = [*other_tokens(folder, actor), *other_ends(folder, actor)]
    if not apart:
        return folder, own_tokens
    _ = _joined(folder.tokenizer, "What is 1 + 1?", "2")  # a template that fails is to fail now
    how = "in its chat template" if folder.tokenizer.chat_template else "one after the other"
    log.warning("reward model %s: question and response are tokenised anew, %s, since %s", folder.path, how, "; ".join(apart))
    return folder, partial(anew, folder.tokenizer)


# ---- the model ----


def _head(model: Any) -> Any:
    return model.score if hasattr(model, "score") else model.classifier


def _by_itself(made: Scalar) -> Tensor:
    """The model's own number for each row of a trial, alone and without padding."""
    tokens, mask, *_ = trial(made.model)
    with torch.no_grad():
        each = [made.model(input_ids=row[real][None], use_cache=False).logits for row, real in zip(tokens, mask, strict=True)]
    return torch.stack([logits.flatten()[-1].float() for logits in each])


def _near(made: Scalar, expected: Tensor) -> bool:
    tokens, mask, _, temperature = trial(made.model)
    with torch.no_grad():
        (got,) = made(inputs(tokens, mask, ends_of(tokens, mask, made.stop), temperature, made.layout))
    return got.shape == expected.shape and torch.allclose(got, expected, atol=TOLERANCE, rtol=0)

"""Prompts, rollouts, experience and mini-batches: frozen, shape-checked records of tensors on the host.

Shapes: `batch` counts sequences (one row per sample), `seq` tokens. Every row starts at column 0 with its prompt, then its
response, then padding on the right; all tensors of a record share one `seq` axis. What stands at column t is about token t: the
log-prob at t is that of token t given those before it. Nothing here is decoded and tokenised again: the tokens that were sampled
are the tokens that are trained on. Where prompts have images, a column of records goes with the rows, whose tensors the samples of a
prompt share.
"""

import dataclasses as dc
import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor
from torch.nn.functional import pad

from rft import tree
from rft.errors import BadInput, ShapeError
from rft.images import RowImages
from rft.sampling import Finish, Sampling
from rft.shapes import check_fields, check_record, require_kind
from rft.state import BatchId, PolicyVersion

DEMONSTRATIONS = BatchId("demonstrations")
"""The batch that demonstrated rows are of; no rollouts have it."""

OPTIONAL = {"reference": "the Reference's log-probs", "values": "values", "returns": "returns"}
"""Columns that an experience may do without."""


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """Tokenised questions of one epoch. `ids` are stable numbers of the data set, each of one question: seeds and groups come from them.

    Raises `BadInput` where an id comes twice: the responses to both would be one group, drawn with the same seeds.
    """

    made_by: ClassVar[str] = "rft.data.prompts makes them (tokenise, then next_prompts)"

    tokens: Int64[Tensor, "prompt seq"]
    mask: Bool[Tensor, "prompt seq"]
    ids: Int64[Tensor, "prompt"]
    epoch: int
    texts: tuple[str, ...]
    answers: tuple[str, ...]
    images: RowImages | None = None
    """Of each prompt; `tokens` has their placeholders. None: no prompt has any."""

    def __post_init__(self) -> None:
        check_record(self)
        check_fields(self, but=("tokens", "mask", "ids"))
        _check_lengths(self, len(self.ids), texts=self.texts, answers=self.answers, images=self.images)
        ids, counts = self.ids.unique(return_counts=True)
        if twice := ids[counts > 1].tolist():
            raise BadInput(
                f"Prompts.ids: {', '.join(map(str, twice[:5]))} come more than once, and their responses would be one group with the same "
                "seeds; give each prompt an id of its own, and for more responses to one prompt write Sampling(samples=…)"
            )

    def __len__(self) -> int:
        return len(self.ids)


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Rollouts:
    """What one call of `generate` sampled on this rank, one row per sample.

    `sampled` marks the response; there `logprobs` are those of the distribution sampled from and `versions` the weights' version.
    Elsewhere they are 0 and -1. `groups` are prompt ids, `samples` number the responses of one prompt.
    """

    made_by: ClassVar[str] = "generate(state, prompts, sampling) gives them"

    batch: BatchId
    tokens: Int64[Tensor, "batch seq"]
    mask: Bool[Tensor, "batch seq"]
    sampled: Bool[Tensor, "batch seq"]
    logprobs: Float32[Tensor, "batch seq"]
    versions: Int64[Tensor, "batch seq"]
    groups: Int64[Tensor, "batch"]
    samples: Int64[Tensor, "batch"]
    finish: tuple[Finish, ...]
    questions: tuple[str, ...]
    responses: tuple[str, ...]
    answers: tuple[str, ...]
    sampling: Sampling
    version: PolicyVersion
    """Of the weights that the engine held, also where this rank had no prompts; of an assembled batch the oldest."""
    images: RowImages | None = None
    """Of each row's prompt."""

    def __post_init__(self) -> None:
        check_record(self)
        texts = {"questions": self.questions, "responses": self.responses, "answers": self.answers}
        _check_lengths(self, len(self.groups), finish=self.finish, images=self.images, **texts)
        if bool((self.sampled & ~self.mask).any()):
            raise ShapeError("Rollouts.sampled marks tokens that Rollouts.mask calls padding")
        if bool((self.versions[self.sampled] < self.version).any()):
            raise ShapeError(f"Rollouts.versions has older ones than Rollouts.version, which is {self.version}")

    def __len__(self) -> int:
        return len(self.groups)


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Experience:
    """Rollouts with their rewards and advantages, and demonstrations: what is trained on.

    Row i is row `rows[i]` of the rollouts `batches[origin[i]]`; old log-probs are joined by these two. A row that is `demonstrated` was
    not sampled but is to be imitated: its `sampled` marks the tokens to imitate, and it has neither reward, advantage nor old log-probs.
    """

    made_by: ClassVar[str] = "experience(rollouts, rewards, advantages) makes one"

    batches: tuple[BatchId, ...]
    origin: Int64[Tensor, "batch"]
    rows: Int64[Tensor, "batch"]
    tokens: Int64[Tensor, "batch seq"]
    mask: Bool[Tensor, "batch seq"]
    sampled: Bool[Tensor, "batch seq"]
    logprobs: Float32[Tensor, "batch seq"]
    groups: Int64[Tensor, "batch"]
    rewards: Float32[Tensor, "batch"]
    advantages: Float32[Tensor, "batch seq"]
    temperature: Float32[Tensor, "batch"]
    """That each row was sampled at, and is scored at."""
    demonstrated: Bool[Tensor, "batch"]
    reference: Float32[Tensor, "batch seq"] | None = None
    """log p of the frozen Reference, at the same temperature; for a penalty on the KL to it."""
    values: Float32[Tensor, "batch seq"] | None = None
    """The Critic's values when the batch was collected; for the advantages, and for a clip of new values near them."""
    returns: Float32[Tensor, "batch seq"] | None = None
    """What the Critic learns."""
    images: RowImages | None = None
    """Of each row's prompt; None: no row has any."""

    def __post_init__(self) -> None:
        check_record(self)
        _check_lengths(self, len(self.rows), images=self.images)
        if self.rows.numel() and int(self.rows.min()) < 0:
            raise ShapeError(f"{type(self).__name__}.rows counts rows of the rollouts from 0, and has {int(self.rows.min())}")
        if self.origin.numel() and not 0 <= int(self.origin.min()) <= int(self.origin.max()) < len(self.batches):
            raise ShapeError(f"{type(self).__name__}.origin names a batch beyond the {len(self.batches)} in batches")

    def __len__(self) -> int:
        return len(self.rows)


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Minibatch(Experience):
    """The rows of an experience that one optimizer step takes on this rank."""

    made_by: ClassVar[str] = "`minibatches`, or `take`, makes some of an Experience"


def assemble(*parts: tuple[Rollouts, Int64[Tensor, "row"]]) -> Rollouts:
    """Some rows of several rollouts as rollouts of their own, a batch with a name of its own; padded to the longest.

    Raises `BadInput` for no part, for what is none, for rows that a part does not have, and for parts that were sampled in different ways.
    """
    for part in parts:
        _require_part(part)
    if not parts or len({part.sampling for part, _ in parts}) > 1:
        raise BadInput(f"assemble needs rollouts that were sampled in one way, got {[part.sampling for part, _ in parts] or 'none'}")
    width = max(part.tokens.shape[1] for part, _ in parts)
    fields = [f.name for f in dc.fields(Rollouts)]
    tensors: dict[str, Any] = {
        name: torch.cat([_widened(getattr(part, name)[rows], width, _PADDING.get(name, 0)) for part, rows in parts])
        for name in fields
        if isinstance(getattr(parts[0][0], name), Tensor)
    }
    texts: dict[str, Any] = {
        name: tuple(getattr(part, name)[row] for part, rows in parts for row in rows.tolist())
        for name in fields
        if isinstance(getattr(parts[0][0], name), tuple) and name != "images"
    }
    images = _joined_images([(part.images, rows.tolist()) for part, rows in parts])
    name = "; ".join(f"{part.batch}: {','.join(map(str, rows.tolist()))}" for part, rows in parts)
    made_of = ", ".join(dict.fromkeys(part.batch for part, _ in parts))
    batch = BatchId(f"assembled {hashlib.blake2b(name.encode(), digest_size=8).hexdigest()} ({made_of})")
    version = min(part.version for part, rows in parts if len(rows) or not any(len(rows) for _, rows in parts))
    return Rollouts(batch=batch, sampling=parts[0][0].sampling, version=version, images=images, **tensors, **texts)


def _require_part(part: Any) -> None:
    """Raises `BadInput` for what is no pair of rollouts and numbers of their rows."""
    call = "assemble((rollouts, rows), …)"
    if not isinstance(part, tuple) or len(cast(tuple[Any, ...], part)) != 2:
        raise BadInput(f"{call}: a part is a pair of rollouts and the numbers of some of their rows, got {part!r:.80}")
    rollouts, rows = cast(tuple[Any, Any], part)
    require_kind(call, "the first of each pair", rollouts, Rollouts)
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        raise BadInput(
            f"{call}: rows are numbers in an int64 tensor of one axis (mask.nonzero()[:, 0] makes some of a mask), got {rows!r:.80}"
        )
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(rollouts):
        raise BadInput(f"{call}: there are rows {int(rows.min())} to {int(rows.max())} asked for, of rollouts with {len(rollouts)}")


def experience(
    rollouts: Rollouts,
    rewards: Float32[Tensor, "batch"],
    advantages: Float32[Tensor, "batch seq"],
    *,
    reference: Float32[Tensor, "batch seq"] | None = None,
    values: Float32[Tensor, "batch seq"] | None = None,
    returns: Float32[Tensor, "batch seq"] | None = None,
) -> Experience:
    """Joins rollouts with rewards `[batch]`, advantages, the Reference's log-probs, values and returns `[batch, seq]`, all float32.

    Raises `ShapeError` where they do not fit.
    """
    require_kind("experience(rollouts, rewards, advantages)", "rollouts", rollouts, Rollouts)
    return Experience(
        batches=(rollouts.batch,),
        origin=torch.zeros_like(rollouts.groups),
        rows=torch.arange(len(rollouts)),
        tokens=rollouts.tokens,
        mask=rollouts.mask,
        sampled=rollouts.sampled,
        logprobs=rollouts.logprobs,
        groups=rollouts.groups,
        rewards=rewards,
        advantages=advantages,
        temperature=torch.full((len(rollouts),), rollouts.sampling.temperature, dtype=torch.float32),
        demonstrated=torch.zeros_like(rollouts.groups, dtype=torch.bool),
        reference=reference,
        values=values,
        returns=returns,
        images=rollouts.images,
    )


def demonstrations(
    tokens: Int64[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    learned: Bool[Tensor, "batch seq"],
    images: RowImages | None = None,
) -> Experience:
    """Rows to imitate: `mask` marks their tokens, `learned` those to learn (not the prompt). Scored at temperature 1.

    On their own they are for `supervised_step`; joined to rollouts by `concatenate`, for an objective with a supervised part. Raises
    `BadInput` where `tokens` is no tensor of rows, and `ShapeError` that names a column of another shape or dtype.
    """
    if not isinstance(cast(object, tokens), Tensor) or tokens.dim() != 2:
        what = f"a tensor of shape {tuple(tokens.shape)}" if isinstance(cast(object, tokens), Tensor) else f"a {type(tokens).__name__}"
        raise BadInput(f"demonstrations(tokens, mask, learned): tokens must be a tensor [batch, seq] of whole numbers, got {what}")
    nothing, each = torch.zeros(tokens.shape), torch.arange(len(tokens))
    return Experience(
        batches=(DEMONSTRATIONS,),
        origin=torch.zeros_like(each),
        rows=each,
        tokens=tokens,
        mask=mask,
        sampled=learned,
        logprobs=nothing,
        groups=torch.full_like(each, -1),
        rewards=torch.zeros(len(tokens)),
        advantages=nothing,
        temperature=torch.ones(len(tokens)),
        demonstrated=torch.ones(len(tokens), dtype=torch.bool),
        images=images,
    )


def concatenate(*parts: Experience) -> Experience:
    """One experience of several, padded to the longest.

    Raises `BadInput` for none, and where some have the Reference's log-probs, values or returns and others, that are no demonstrations,
    have not.
    """
    if not parts:
        raise BadInput("concatenate needs at least one experience")
    for part in parts:
        require_kind("concatenate(*parts)", "each of parts", part, Experience)
    batches = tuple(dict.fromkeys(b for part in parts for b in part.batches))
    width = max(part.tokens.shape[1] for part in parts)
    joined: dict[str, Any] = {
        name: torch.cat([_widened(getattr(part, name), width) for part in parts])
        for name in ("rows", "tokens", "mask", "sampled", "logprobs", "groups", "rewards", "advantages", "temperature", "demonstrated")
    }
    origin = [torch.tensor([batches.index(part.batches[o]) for o in part.origin.tolist()], dtype=torch.int64) for part in parts]
    joined |= {name: _where_given(parts, name, width) for name in OPTIONAL}
    joined["images"] = _joined_images([(part.images, range(len(part))) for part in parts])
    return Experience(batches=batches, origin=torch.cat(origin), **joined)


def _where_given(parts: tuple[Experience, ...], name: str, width: int) -> Tensor | None:
    """A column that experiences may have; 0 for demonstrations that have not."""
    given: list[Tensor | None] = [getattr(part, name) for part in parts]
    if all(column is None for column in given):
        return None
    if any(column is None and not bool(part.demonstrated.all()) for part, column in zip(parts, given, strict=True)):
        raise BadInput(f"some of the experiences have {OPTIONAL[name]} and some have not; give them to all, or to none")
    filled = [torch.zeros(part.tokens.shape) if column is None else column for part, column in zip(parts, given, strict=True)]
    return torch.cat([_widened(column, width) for column in filled])


def _joined_images(parts: Sequence[tuple[RowImages | None, Sequence[int]]]) -> RowImages | None:
    """The images of some rows of several columns; None where no row has any."""
    joined = tuple(None if images is None else images[row] for images, rows in parts for row in rows)
    return joined if any(each is not None for each in joined) else None


def take(source: Experience, rows: Int64[Tensor, "row"]) -> Minibatch:
    """The mini-batch of the given rows of `source`, counted from 0, in that order. Raises `BadInput` for rows that it does not have."""
    require_kind("take(source, rows)", "source", source, Experience)
    numbers: Any = rows
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.int64 or numbers.dim() != 1:
        what = f"{tuple(rows.shape)} of {rows.dtype}" if isinstance(numbers, Tensor) else type(numbers).__name__
        raise BadInput(f"take(source, rows): rows must be a tensor [row] of int64, such as torch.arange(len(source)); got {what}")
    if strange := rows[(rows < 0) | (rows >= len(source))].tolist():
        raise BadInput(f"take(source, rows): there is no row {strange[0]}; source has {len(source)} rows, counted from 0")
    fields: dict[str, Any] = {f.name: getattr(source, f.name) for f in dc.fields(source)}
    taken: dict[str, Any] = {name: value[rows] if isinstance(value, Tensor) else value for name, value in fields.items()}
    taken["images"] = _joined_images([(source.images, rows.tolist())])
    return Minibatch(**taken)


_PADDING = {"versions": -1}


def _widened(value: Tensor, width: int, filling: int = 0) -> Tensor:
    return value if value.dim() == 1 else pad(value, (0, width - value.shape[1]), value=filling)


def _check_lengths(record: Any, count: int, **columns: tuple[Any, ...] | None) -> None:
    for name, column in columns.items():
        if column is not None and len(column) != count:
            raise ShapeError(f"{type(record).__name__}.{name} has {len(column)} entries for {count} rows")

"""What one forward pass takes, made on the host: rows laid out as the model takes them, and which of their tokens are asked for."""

import dataclasses as dc
from collections.abc import Callable
from typing import Any

from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from rft import tree
from rft.ops.logprobs import predictions
from rft.ops.packing import Segments, pack, segments
from rft.parallel.batches import Layout
from rft.seeing import Seen, embedded

Look = Callable[[Tensor, Tensor], Seen]
"""What is seen of the images of rows, from their tokens and mask, `[batch, seq]`."""


@tree.record
@dc.dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Rows in one of the two layouts. `wanted` counts the tokens asked for, row by row."""

    tokens: Int64[Tensor, "line place"]
    """Packed: one line of all rows. Padded: a line for each."""
    segments: Segments | None
    """How packed tokens fall into rows; None: they are padded."""
    predictors: Int64[Tensor, "wanted"]
    """The places, counted through all lines, whose hidden states predict what is asked for."""
    targets: Int64[Tensor, "wanted"] | None
    """The tokens asked for; None: the hidden states that predict them are, and not what a head makes of them."""
    temperature: Float32[Tensor, "wanted"]
    """That each is scored at."""
    seen: Seen | None = None
    """The rows' images; None: the vision tower takes no part, if there is one."""


def inputs(
    tokens: Int64[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    wanted: Bool[Tensor, "batch seq"],
    temperature: Float32[Tensor, "batch"],
    layout: Layout,
    look: Look | None = None,
) -> Inputs:
    """Lays out rows that begin at column 0 and have no holes. The first token of a row cannot be wanted.

    Padding may be any number. A row without tokens gets one, so that no pass is over nothing. `look` is given tokens and their mask
    where the vision tower is to take part.
    """
    real = mask.clone()
    real[:, :1] = True
    tokens = tokens.masked_fill(~mask, 0)  # a model looks every id up
    where = segments(real) if layout == "packed" else None
    run, asked = (tokens.flatten(), wanted.flatten()) if where is None else (pack(tokens, real), pack(wanted, real))
    found, seen = predictions(run, asked), look(tokens, real) if look else None
    return Inputs(
        tokens=tokens if where is None else run[None],
        segments=where,
        predictors=found.predictors,
        targets=found.targets,
        temperature=pack(temperature[:, None].expand_as(wanted), wanted),
        seen=seen.packed(real) if seen and where else seen,
    )


def predicting(model: Any, asked: Inputs) -> Float[Tensor, "wanted width"]:
    """The hidden states, after the last norm, that predict the tokens asked for, by a Hugging Face model with or without a head."""
    rows: dict[str, Any] = {} if asked.segments is None else {"segments": asked.segments, "position_ids": asked.segments.positions[None]}
    if asked.seen is None:
        rows["input_ids"] = asked.tokens
    else:
        rows |= {"inputs_embeds": embedded(model, asked.tokens, asked.seen), "position_ids": asked.seen.positions}
    hidden = model.get_decoder()(use_cache=False, **rows).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, asked.predictors)

"""Attention over rows that lie one behind the other, as a function in transformers' own registry of them."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rft.ops.packing import Segments, one_behind_the_other, side_by_side
from rft.parallel.batches import Layout
from rft.seeing import eyes

log = logging.getLogger("rft")

NAME = "rft_packed"


class CannotPack(Exception):
    """Why a model's rows must be padded. Comes only while a trainer is built, since a layer is called alike every time."""


def prepare(model: Any) -> None:
    """Makes a Hugging Face model use `attention`. Raises `CannotPack` where it has no place for it, or says that it is windowed."""
    from transformers import AttentionInterface

    config = model.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if kinds or getattr(config, "attention_chunk_size", None):
        raise CannotPack(f"it has layers of {', '.join(kinds) or 'chunked attention'}")
    passed_on = inspect.signature(model.get_decoder().forward).parameters.values()
    if not model._supports_attention_backend or all(p.kind != p.VAR_KEYWORD for p in passed_on):
        raise CannotPack("its attention cannot be replaced")
    AttentionInterface.register(NAME, attention)
    _decoder(model).set_attn_implementation(NAME)


def choose(model: Any, right: Callable[[Layout], bool]) -> Layout:
    """Packed rows where the model takes them and `right` finds them to compute the same as padded ones; and prepares the model."""
    name, before = type(model).__name__, _decoder(model).config._attn_implementation
    try:
        prepare(model)
        if not right("packed"):
            raise CannotPack("they touch each other")
        log.info("%s: rows are packed without padding", name)
        return "packed"
    except CannotPack as why:
        _decoder(model).set_attn_implementation(before)
        log.warning("%s cannot take packed rows, they are padded: %s", name, why)
        return "padded"


def _decoder(model: Any) -> Any:
    """What computes with packed rows: of a model that takes images not the vision tower, whose attention looks both ways."""
    return model if eyes(model) is None else model.get_decoder()


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row: query `[1, head, token, dim]`, key and value with as many heads or fewer.

    Gives `[1, token, head, dim]`. Raises `CannotPack` for whatever it does not understand: a window, a soft cap, a mask of the
    model's own, an attention that looks ahead.
    """
    del position_ids  # what they say of the rows, the segments say
    strange = [name for name, given in others.items() if isinstance(given, Tensor) or given]
    if attention_mask is not None:
        strange.append("attention_mask")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        strange.append("is_causal=False")
    if segments is None or strange:
        raise CannotPack(f"{type(module).__name__} is given {', '.join(strange) or 'no segments'}")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    compute = _by_kernel if _kernel_takes(query, value) else _by_row
    return compute(q, k, v, segments, scaling)[None], None


def _kernel_takes(query: Tensor, value: Tensor) -> bool:
    width = query.shape[-1]
    fits = query.dtype in (torch.bfloat16, torch.float16) and width == value.shape[-1] and width <= 256 and width % 8 == 0
    return query.is_cuda and fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, where: Segments, scaling: float | None) -> Tensor:
    """`[token, head, dim]`, by FlashAttention's kernels for rows of different length."""
    bounds, longest = where.bounds, where.longest
    return _kernel()(query, key, value, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0))


@functools.cache
def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # here: it imports torch's compiler, which takes seconds

    # Older builds take fewer heads of keys and values than of queries without being told.
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn


def _by_row(query: Tensor, key: Tensor, value: Tensor, where: Segments, scaling: float | None) -> Tensor:
    """`[token, head, dim]`, where those cannot be used: rows are padded on the right, where causal attention never looks."""
    q, k, v = (side_by_side(part, where).transpose(1, 2) for part in (query, key, value))
    mixed = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return one_behind_the_other(mixed.transpose(1, 2), where)

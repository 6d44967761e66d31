"""What a pass through a model holds on the device beside the weights, found by running it on the meta device.

Every operation of the model's own code runs there, forward and backward, on tensors that have shapes and no memory, and what lives is
counted (`Meter`): so it is right for any architecture, with gradient checkpointing too. Attention and head are stood in for, since a
GPU's kernels keep other things than the meta device's (`surrogates`).

On a transformer block like Qwen2's, with hidden width h, MLP width m, keys and values k wide in all heads together, and a heads, in bf16,
what is kept of a token for the backward pass amounts to 20 h + 4 k + 8 m + 4 a + 8 bytes; with gradient checkpointing to 2 h.
"""

import dataclasses as dc
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from rft.errors import BadInput
from rft.memory.meter import Meter
from rft.memory.outline import Blueprint, head_of, on_meta
from rft.memory.surrogates import ATTENTION, attention, scores
from rft.models import attention_of
from rft.parallel.batches import Layout
from rft.spec import DType
from rft.trainers import packed
from rft.trainers.hugging_face import blocks


@dc.dataclass(frozen=True, kw_only=True)
class Pass:
    """One micro-batch, as a backend computes it."""

    tokens: int
    """All of them."""
    wanted: int
    """Those that the head is asked for."""
    longest: int
    """The longest row: what rows are padded to, where they cannot be packed."""
    dtype: DType
    checkpointing: bool = False
    device: str = "cuda"
    """The kind of device; a CPU's kernels keep more than is counted here where rows are long."""


@dc.dataclass(frozen=True)
class Activations:
    """Bytes beside weights and gathered weights. Gradients of a block are let go when it has them all."""

    scoring: int
    """The most that lives in a pass without gradient."""
    kept: int
    """What the forward pass leaves for the backward pass."""
    training: int
    """The most that lives in a pass with gradient, those of a block and of what stands outside of all blocks included."""
    outside: int
    """Gradients, in the dtype of computing, of what stands outside of all blocks: they are there until the backward pass is over."""


@functools.lru_cache(maxsize=256)
def activations(of: Blueprint, one: Pass) -> Activations:
    """Of a model and a micro-batch. Raises `BadInput` for a model whose code asks for values, which nothing has here."""
    model = on_meta(of, getattr(torch, one.dtype))
    layout = _prepared(model)
    parameters = list(model.parameters())
    inputs = _inputs(one, layout)
    mask = 0 if layout == "packed" else inputs[0].numel() * inputs[0].shape[1]  # a bool for every pair of places, as attention takes it
    try:
        scoring = _scoring(of, model, one, inputs, parameters)
        if one.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        kept, training = _training(of, model, one, inputs, parameters)
    except (NotImplementedError, RuntimeError) as error:
        raise BadInput(
            f"the activations of {type(model).__name__} cannot be planned: its code reads values as it runs ({error})"
        ) from error
    within = {id(p) for block in blocks(model) for p in block.parameters()}
    outside = sum(p.nbytes for p in parameters if p.requires_grad and id(p) not in within)
    return Activations(scoring + mask, kept + mask, training + mask, outside)


def bounded(of: Blueprint, one: Pass) -> Activations:
    """About the same from few runs: between powers of 4 it is read off the chord, and all tokens count as wanted.

    For a job that runs, where every batch has another length and a second is too long to wait.
    """
    lower = 1
    while 4 * lower < one.tokens:
        lower *= 4
    low, high = (activations(of, _rounded(one, tokens)) for tokens in (lower, 4 * lower))
    share = (one.tokens - lower) / (3 * lower)
    at = {f.name: getattr(low, f.name) + share * (getattr(high, f.name) - getattr(low, f.name)) for f in dc.fields(low)}
    return Activations(**{name: math.ceil(value) for name, value in at.items()})


def _rounded(one: Pass, tokens: int) -> Pass:
    longest = min(1 << (one.longest - 1).bit_length(), tokens)
    return dc.replace(one, tokens=tokens, wanted=tokens, longest=longest)


def _prepared(model: Any) -> Layout:
    """Sets the attention that stands in, and says how the model's rows are laid out. The plain attention stays as it is."""
    from transformers import AttentionInterface

    layout: Layout = "packed"
    try:
        packed.prepare(model)
    except packed.CannotPack:
        layout = "padded"
    if attention_of(model.config) is None:
        AttentionInterface.register(ATTENTION, attention)
        model.set_attn_implementation(ATTENTION)
        return layout
    model.set_attn_implementation("eager")
    return "padded"


def _inputs(one: Pass, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions, and the places whose hidden states the head is asked for."""
    shape = (1, one.tokens) if layout == "packed" else (-(-one.tokens // one.longest), one.longest)
    like: dict[str, Any] = {"dtype": torch.int64, "device": "meta"}
    return torch.zeros(shape, **like), torch.zeros(1, shape[1], **like), torch.zeros(one.wanted, **like)


def _scoring(of: Blueprint, model: Any, one: Pass, inputs: tuple[Tensor, ...], known: list[Any]) -> int:
    model.eval()
    with torch.no_grad(), Meter([*known, *inputs, *model.buffers()]) as meter:
        _ = _answer(of, model, one, inputs)
    return meter.peak


def _training(of: Blueprint, model: Any, one: Pass, inputs: tuple[Tensor, ...], known: list[Any]) -> tuple[int, int]:
    model.train()
    for block in blocks(model):
        _let_go_together(block)
    with Meter([*known, *inputs, *model.buffers()]) as meter:
        answer = _answer(of, model, one, inputs)
        kept = meter.live
        torch.autograd.backward(answer.sum())
    return kept, meter.peak


def _answer(of: Blueprint, model: Any, one: Pass, inputs: tuple[Tensor, ...]) -> Tensor:
    tokens, positions, wanted = inputs
    rows: dict[str, Tensor] = {"position_ids": positions}
    if attention_of(model.config) is not None:  # without a mask of ours it would look into the positions for one
        rows["attention_mask"] = torch.ones_like(tokens)
    hidden = _decoder(model)(input_ids=tokens, use_cache=False, **rows).last_hidden_state
    asked = hidden.flatten(0, 1).index_select(0, wanted)
    if of.head == "language":
        return scores(asked, model.get_output_embeddings().weight, one.device)[0]
    return asked.float() @ head_of(model).weight.float()[0]


def _decoder(model: Any) -> Any:
    return model.get_decoder() if model.get_output_embeddings() is not None else model.base_model


def _let_go_together(block: nn.Module) -> None:
    """Lets a block's gradients go when all of them are there, as a sharding backend does when it reduces them."""
    parameters = [p for p in block.parameters() if p.requires_grad]

    def let_go(_: Tensor) -> None:
        if all(p.grad is not None for p in parameters):
            for p in parameters:
                p.grad = None

    for parameter in parameters:
        _ = parameter.register_post_accumulate_grad_hook(let_go)

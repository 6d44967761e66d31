"""A plain single-process trainer, written row by row and token by token on nothing but transformers and torch: what must come out."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.experience import Experience


def plain_model(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    seeing = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    return (AutoModelForImageTextToText if seeing else AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)


def shown(model: Any, batch: Experience, row: int) -> dict[str, Tensor]:
    """The images of a row, as the model itself takes them; its positions are its own."""
    images = None if batch.images is None else batch.images[row]
    if images is None:
        return {}
    tokens = batch.tokens[row, None, : int(batch.mask[row].sum())]
    kinds = (tokens == model.config.image_token_id).int()
    return {"pixel_values": images.pixels, "image_grid_thw": images.grids, "mm_token_type_ids": kinds}


def plain_logprobs(model: Any, batch: Experience, row: int) -> list[Tensor]:
    """log p of every token of a row but the first, each a scalar with gradient."""
    tokens = batch.tokens[row, : int(batch.mask[row].sum())]
    logits = model(input_ids=tokens[None], use_cache=False, **shown(model, batch, row)).logits[0]
    table = torch.log_softmax(logits / (float(batch.temperature[row]) or 1.0), dim=-1)
    return [table[t - 1, tokens[t]] for t in range(1, len(tokens))]


def all_logprobs(model: Any, batch: Experience) -> Tensor:
    """The same for all rows, as a table with zeros elsewhere."""
    result = torch.zeros(batch.tokens.shape)
    with torch.no_grad():
        for row in range(len(batch)):
            for t, value in enumerate(plain_logprobs(model, batch, row), start=1):
                result[row, t] = value
    return result


def all_entropies(model: Any, batch: Experience) -> Tensor:
    """−Σ p log p of the distribution that each token but the first of a row is of, as a table with zeros elsewhere."""
    result = torch.zeros(batch.tokens.shape)
    with torch.no_grad():
        for row, length in enumerate(batch.mask.sum(dim=1).tolist()):
            logits = model(input_ids=batch.tokens[row, None, :length], use_cache=False).logits[0]
            p = torch.softmax(logits / (float(batch.temperature[row]) or 1.0), dim=-1)
            result[row, 1:length] = -(p * p.log()).sum(dim=-1)[:-1]
    return result


def plain_loss(model: Any, batch: Experience, old: Tensor | None, clip: float = 0.2) -> Tensor:
    """The clipped surrogate, averaged over all sampled tokens of the batch."""
    losses: list[Tensor] = []
    for row in range(len(batch)):
        for t, new in enumerate(plain_logprobs(model, batch, row), start=1):
            if batch.sampled[row, t]:
                before = new.detach() if old is None else old[row, t]
                ratio, gain = torch.exp(new - before), float(batch.advantages[row, t])
                value = ratio.item()
                bound = min(max(value, 1 - clip), 1 + clip)
                losses.append(-ratio * gain if value * gain <= bound * gain else torch.tensor(-bound * gain))
    return torch.stack(losses).sum() / len(losses)


def gradient(model: Any) -> dict[str, Tensor]:
    """Of every parameter, by name; tied ones once."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def saved(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What a trainer's `saved` is to give, in full."""
    named = dict(model.named_parameters())
    states = {name: optimizer.state[p] for name, p in named.items()}
    moments = {
        f"optimizer.{moment}.{name}": states[name][moment].clone() if states[name] else torch.zeros_like(p)
        for moment in ("exp_avg", "exp_avg_sq")
        for name, p in named.items()
    }
    steps = max((int(state["step"]) for state in states.values() if state), default=0)
    return {**{f"model.{name}": p.detach().clone() for name, p in named.items()}, **moments, "optimizer.steps": torch.tensor(steps)}


def norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """‖one − other‖ / ‖other‖ over all tensors together."""
    assert one.keys() == other.keys()
    return norm({name: one[name].double() - other[name].double() for name in one}) / norm(other)

"""Batched sampling with a key-value cache, on top of a causal language model's forward pass."""

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rft.engines.protocol import Completion, Request
from rft.engines.sampling import draw, uniforms
from rft.engines.stopping import StopStrings
from rft.sampling import Sampling
from rft.seeing import Eyes, embedded

KEEP_ABOVE = 0.75
"""The batch is cut down once no more than this share of its rows still runs: copying the cache costs about one step."""


@dc.dataclass
class _Batch:
    """The rows that are being computed: `rows` are their numbers among the requests."""

    cache: Any
    mask: Int64[Tensor, "row seq"]
    starts: Int64[Tensor, "row"]
    """The position of the first new token: of text the prompt's length, while an image takes fewer positions than tokens."""
    rows: Int64[Tensor, "row"]
    alive: Bool[Tensor, "row"]

    def keep_alive(self) -> None:
        """Drops the rows that have ended, where that pays."""
        kept = self.alive.nonzero()[:, 0]
        if not 0 < len(kept) <= KEEP_ABOVE * len(self.rows):
            return
        self.cache.batch_select_indices(kept)
        self.mask, self.starts, self.rows, self.alive = (x[kept] for x in (self.mask, self.starts, self.rows, self.alive))


@torch.inference_mode()
def decode(
    model: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    ends: Int64[Tensor, "end"],
    stops: StopStrings,
    eyes: Eyes | None = None,
) -> list[Completion]:
    """Samples one response per request, all of them together; each row's random numbers come from its own seed.

    `eyes` are those of the model, if requests may have images.
    """
    device = ends.device
    numbers = torch.stack([uniforms(r.seed, sampling.max_new_tokens) for r in requests]).to(device)
    tokens = torch.zeros(len(requests), sampling.max_new_tokens, dtype=torch.int64, device=device)
    logprobs = torch.zeros(tokens.shape, dtype=torch.float32, device=device)
    counts = torch.full((len(requests),), sampling.max_new_tokens, device=device)
    stopped = torch.zeros_like(counts, dtype=torch.bool)
    batch, logits = _prefill(model, requests, sampling.max_new_tokens, device, eyes)
    for step in range(sampling.max_new_tokens):
        drawn, scores = draw(logits, numbers[batch.rows, step], sampling)
        tokens[batch.rows, step], logprobs[batch.rows, step] = drawn, scores
        ended = batch.alive & (torch.isin(drawn, ends) | _stopped(stops, tokens[batch.rows, : step + 1], batch.alive))
        stopped[batch.rows[ended]] = True
        counts[batch.rows[ended]] = step + 1
        batch.alive &= ~ended
        if step + 1 == sampling.max_new_tokens or not batch.alive.any():
            break
        batch.keep_alive()
        logits = _step(model, batch, tokens[batch.rows, step], step)
    return _completions(tokens, logprobs, counts, stopped)


@torch.inference_mode()
def score(model: Any, sequences: Sequence[tuple[int, ...]], device: torch.device) -> list[list[float]]:
    """log p(token t | before t) in fp32 at temperature 1, for every token but the first of each sequence."""
    tokens = pad_sequence([torch.tensor(s) for s in sequences], batch_first=True).to(device)
    mask = pad_sequence([torch.ones(len(s), dtype=torch.int64) for s in sequences], batch_first=True).to(device)
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].cpu()
    return [row[: len(s) - 1].tolist() for row, s in zip(logprobs, sequences, strict=True)]


def _prefill(
    model: Any, requests: Sequence[Request], room: int, device: torch.device, eyes: Eyes | None
) -> tuple[_Batch, Float[Tensor, "row vocab"]]:
    """Computes each distinct prompt once, left-padded, and then gives every request its own copy of the cache."""
    from transformers import DynamicCache

    # The same tokens are another prompt with other images; requests of one prompt hold the same record of them.
    prompts = list({(request.tokens, id(request.images)): request for request in requests}.values())
    number = {(prompt.tokens, id(prompt.images)): index for index, prompt in enumerate(prompts)}
    tokens = pad_sequence([torch.tensor(p.tokens) for p in prompts], batch_first=True, padding_side="left").to(device)
    lengths = torch.tensor([len(p.tokens) for p in prompts], device=device)
    mask = torch.ones(len(prompts), tokens.shape[1] + room, dtype=torch.int64, device=device)
    mask[:, : tokens.shape[1]] = torch.arange(tokens.shape[1], device=device) >= tokens.shape[1] - lengths[:, None]
    prompt_mask = mask[:, : tokens.shape[1]]
    given = _given(model, prompts, tokens, prompt_mask, eyes)
    cache = DynamicCache(config=model.config)
    output = model(
        **given,
        attention_mask=prompt_mask,
        past_key_values=cache,
        use_cache=True,
        # An index, since a slice is no contiguous tensor, and the head would then be copied once per row.
        logits_to_keep=torch.tensor([tokens.shape[1] - 1], device=device),
    )
    source = torch.tensor([number[request.tokens, id(request.images)] for request in requests], device=device)
    if len(prompts) < len(requests):
        cache.batch_select_indices(source)
    rows, starts = torch.arange(len(requests), device=device), given["position_ids"][..., -1].reshape(-1, len(prompts)).amax(0) + 1
    batch = _Batch(cache, mask[source], starts[source], rows, torch.ones_like(rows, dtype=torch.bool))
    return batch, output.logits[source, -1]


def _given(
    model: Any, prompts: Sequence[Request], tokens: Int64[Tensor, "row seq"], mask: Int64[Tensor, "row seq"], eyes: Eyes | None
) -> dict[str, Tensor]:
    """The prompts and their positions, as the model takes them: with images, as what the vision tower makes of those."""
    images = tuple(prompt.images for prompt in prompts)
    if eyes is None or not any(each is not None for each in images):
        return {"input_ids": tokens, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    seen = eyes.see(tokens.cpu(), mask.cpu().bool(), images).to(tokens.device)
    return {"inputs_embeds": embedded(model, tokens, seen), "position_ids": seen.positions}


def _step(model: Any, batch: _Batch, tokens: Int64[Tensor, "row"], step: int) -> Float[Tensor, "row vocab"]:
    width = batch.cache.get_seq_length() + 1
    output = model(
        input_ids=tokens[:, None],
        attention_mask=batch.mask[:, :width],
        position_ids=(batch.starts + step)[:, None],
        past_key_values=batch.cache,
        use_cache=True,
    )
    return output.logits[:, -1]


def _stopped(stops: StopStrings, tokens: Int64[Tensor, "row seq"], alive: Bool[Tensor, "row"]) -> Bool[Tensor, "row"]:
    if not stops:
        return torch.zeros_like(alive)
    rows = zip(tokens.tolist(), alive.tolist(), strict=True)
    return torch.tensor([runs and stops.reached(ids) for ids, runs in rows], device=alive.device)


def _completions(
    tokens: Int64[Tensor, "row seq"], logprobs: Float32[Tensor, "row seq"], counts: Int64[Tensor, "row"], stopped: Bool[Tensor, "row"]
) -> list[Completion]:
    columns = (tokens.tolist(), logprobs.tolist(), counts.tolist(), stopped.tolist())
    return [
        Completion(tokens=tuple(ids[:n]), logprobs=tuple(scores[:n]), finish="stop" if by_itself else "length")
        for ids, scores, n, by_itself in zip(*columns, strict=True)
    ]

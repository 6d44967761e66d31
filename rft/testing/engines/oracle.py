"""What an engine is held against: transformers' own forward pass in fp32, and `Sampling`'s distribution, as plainly as possible.

A `module` here is a causal LM of transformers, or whatever else gives `module(tokens).logits` and has named parameters.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft.engines.protocol import Engine, Request
from rft.sampling import Sampling

END = 257
"""The token that ends a response of `rft.testing.models`' tiny models."""
GREEDY = Sampling(temperature=0, max_new_tokens=10)
PROMPTS = ((1, 2, 3), (7, 8, 9, 10, 11, 12), (5,), tuple(range(30, 60)))
LONG = tuple(range(200))
"""A prompt that is long enough to be cached."""
MAX_MODEL_LEN = 256


def requests(*prompts: tuple[int, ...], seed: int = 0) -> list[Request]:
    """One for each prompt, with seeds that go on from `seed`."""
    return [Request(tokens=tokens, seed=seed + index) for index, tokens in enumerate(prompts)]


def weights(module: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What a trainer sends: tied heads once."""
    return {name: parameter.detach().to(dtype) for name, parameter in module.named_parameters()}


def wake_with(engine: Engine, module: Any, sent: dict[str, Tensor] | None = None) -> None:
    """Brings an engine from any condition to: awake, with these weights; `sent` where a checkpoint has other names than the model."""
    engine.sleep("release")
    engine.wake_weights()
    assert engine.load(iter((sent or weights(module)).items())) == engine.checksums()
    engine.flush()
    engine.wake_cache()


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """log p of `Sampling`'s docstring for one row of logits, written down a second time and as plainly as possible."""
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    scaled = logits / sampling.temperature
    kept = scaled.softmax(-1) >= sampling.min_p * scaled.softmax(-1).max()
    if sampling.top_k:
        kept &= scaled >= scaled.topk(min(sampling.top_k, len(scaled))).values[-1]
    if sampling.top_p < 1:
        probabilities = scaled.masked_fill(~kept, -torch.inf).softmax(-1)
        mass = 0.0
        for token in probabilities.argsort(descending=True).tolist():
            kept[token] &= mass < sampling.top_p
            mass += float(probabilities[token])
    return scaled.masked_fill(~kept, -torch.inf).log_softmax(-1)


@torch.no_grad()
def expected_logprobs(module: Any, prompt: tuple[int, ...], response: tuple[int, ...], sampling: Sampling) -> list[float]:
    """Of a response's tokens, under the distribution that they were sampled from."""
    logits = module(torch.tensor([prompt + response])).logits[0]
    rows = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    return [float(distribution(logits[row], sampling)[token]) for row, token in zip(rows, response, strict=True)]


@torch.no_grad()
def greedy(module: Any, prompt: tuple[int, ...], count: int, end: int = END) -> tuple[int, ...]:
    """Without a cache, token by token."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and (len(tokens) == len(prompt) or tokens[-1] != end):
        tokens.append(int(module(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def is_close(ours: Sequence[float], theirs: Sequence[float], tolerance: float) -> bool:
    """Whether all of them are, in nats."""
    return torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=tolerance)

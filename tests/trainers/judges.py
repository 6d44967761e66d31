"""Tiny reward models, and what they are to give: written with nothing but transformers."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rft.experience import Rollouts
from rft.sampling import Sampling
from rft.state import BatchId, PolicyVersion
from rft.testing.models import tiny_config, tiny_tokenizer
from tests.trainers.batches import random_experience

ALL = (0, 1, 2, 3, 4, 5, 6, 7)
SHARES = {1: [ALL], 2: [(0, 1, 2, 3, 4), (5, 6, 7)], 4: [(0, 1), (2, 3, 4), (5, 6), (7,)]}
IDLE = {1: [ALL], 2: [ALL, ()], 4: [ALL, (), (), ()]}
WORDS = ("What is 2 + 3?", "Say yes.", "How many days has a week?", "Name a colour.", "1 + 1?", "Go on.", "Why?", "And then?")
REPLIES = ("5", "yes", "A week has seven days.", "blue", "2", "", "Because it is so.", "The end")


def tiny_judge(
    folder: Path,
    kind: Literal["SequenceClassification", "TokenClassification"] = "SequenceClassification",
    family: Literal["qwen2", "llama"] = "qwen2",
    *,
    seed: int = 5,
    labels: int = 1,
    tokenizer: Any = None,
    **changes: Any,
) -> Path:
    """Saves a reward model with random weights to `folder`, and returns it."""
    import transformers

    config = tiny_config(family, tied=False)
    config.num_labels = labels
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def other_tokenizer(*, template: bool) -> Any:
    """Bytes as tokens, but not the same ones as the tiny models'; it pads on the left, which must not matter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    vocabulary = {token: index for index, token in enumerate(("<|end|>", "<|pad|>", *alphabet))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", padding_side="left")
    if template:
        made.chat_template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|end|>' }}{% endfor %}"
    return made


def random_rollouts(*rows: int) -> Rollouts:
    """Some rows of `random_experience`, as if they had been sampled; row 6 sampled nothing. Row 2 ends in padding's own token."""
    source, index = random_experience(), torch.tensor(rows, dtype=torch.int64)
    tokens = source.tokens.clone()
    tokens[2, 4] = 256
    return Rollouts(
        batch=BatchId("random"),
        tokens=tokens[index],
        mask=source.mask[index],
        sampled=source.sampled[index],
        logprobs=source.logprobs[index],
        versions=torch.where(source.sampled[index], 0, -1),
        groups=index,
        samples=torch.zeros_like(index),
        finish=("stop",) * len(rows),
        questions=tuple(WORDS[row] for row in rows),
        responses=tuple(REPLIES[row] for row in rows),
        answers=("",) * len(rows),
        sampling=Sampling(temperature=0.7),
        version=PolicyVersion(0),
    )


def given(like: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Weights of the same shapes, in fp32."""
    draw = torch.Generator().manual_seed(step)
    return {name: torch.randn(tensor.shape, generator=draw) for name, tensor in like.items()}


def plain_scores(folder: Path, rows: list[list[int]]) -> Tensor:
    """By one plain forward for each row, alone, as transformers itself scores it."""
    import transformers

    kind = json.loads((folder / "config.json").read_text())["architectures"][0].rpartition("For")[2]
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([row]), use_cache=False).logits.flatten()[-1] for row in rows])

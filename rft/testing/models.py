"""Tiny causal language models with real tokenizers, written as ordinary model folders. Nothing is downloaded."""

from pathlib import Path
from typing import Any, Literal

import torch

HEAD = 32
"""The smallest head size that vLLM's CPU attention takes."""
SPECIAL = ("<|pad|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_model(
    folder: Path,
    family: Literal["qwen2", "llama"] = "qwen2",
    *,
    tied: bool = True,
    vocab: int = 320,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Saves a causal LM with random weights and a byte-level tokenizer to `folder`, and returns it.

    `vocab` is at least 258: all bytes, `<|pad|>` (256) and `<|end|>` (257); rows beyond them have no text. Biases (qwen2) and norms
    are random too, so that losing one shows.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, tied=tied, vocab=vocab, heads=heads, kv_heads=kv_heads, layers=layers)
    with torch.random.fork_rng(devices=[]):
        _ = torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_config(
    family: Literal["qwen2", "llama"], *, tied: bool, vocab: int = 320, heads: int = 4, kv_heads: int = 2, layers: int = 2
) -> Any:
    """The configuration of `tiny_model`."""
    from transformers import LlamaConfig, Qwen2Config

    return {"qwen2": Qwen2Config, "llama": LlamaConfig}[family](
        vocab_size=vocab,
        hidden_size=HEAD * heads,
        intermediate_size=2 * HEAD * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        pad_token_id=256,
        eos_token_id=257,
        bos_token_id=None,
    )


def tiny_tokenizer() -> Any:
    """Bytes as tokens 0 to 255, `<|pad|>` and `<|end|>`, and a minimal chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*alphabet, *SPECIAL))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
    wrapped.chat_template = TEMPLATE
    return wrapped

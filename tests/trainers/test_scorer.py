"""Packed, padded and row by row through the model's own logits: the same log-probs, entropies and gradients."""

import itertools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rft.errors import BadInput
from rft.ops.packing import segments, unpack
from rft.ops.scores import head_scores
from rft.trainers import packed
from rft.trainers.inputs import inputs
from rft.trainers.scorer import Scorer, scorer

LENGTHS = (5, 1, 9, 0, 7, 2)
"""Among others a row of one token, and one of none."""
TEMPERATURE = torch.tensor([1.0, 0.7, 0.5, 1.0, 0.0, 2.0])
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PACKED: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama, tied": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen2, tied": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "qwen3, tied": {"tie_word_embeddings": True},
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
    "phi": {"partial_rotary_factor": 0.5},  # its head has a bias
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
PADDED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "qwen2, windowed": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "gemma2, all full": {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "lm_head_multiplier": 0.5},
}


def network(name: str) -> Any:
    """A tiny one with random weights, biases and norms, too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name.split(",")[0], **SIZES | {**PACKED, **PADDED}[name])
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, rubbish on padding; their mask; and those wanted, which have holes."""
    draw = torch.Generator().manual_seed(1)
    mask = torch.arange(max(LENGTHS) + 1) < torch.tensor(LENGTHS)[:, None]
    tokens = torch.randint(3, 97, mask.shape, generator=draw).where(mask, torch.tensor(-100))
    return tokens, mask, mask & (torch.rand(mask.shape, generator=draw) < 0.7) & (torch.arange(mask.shape[1]) > 0)


def by_logits(model: Any) -> tuple[Tensor, Tensor]:
    tokens, mask, wanted = rows()
    logprobs, entropies = ([[torch.tensor(0.0)] * mask.shape[1] for _ in LENGTHS] for _ in range(2))
    for row, length in enumerate(LENGTHS):
        if length < 2:
            continue
        logits = model(input_ids=tokens[row, None, :length], use_cache=False).logits[0]
        table = torch.log_softmax(logits / (float(TEMPERATURE[row]) or 1.0), dim=-1)
        for t in range(1, length):
            if wanted[row, t]:
                logprobs[row][t] = table[t - 1, tokens[row, t]]
                entropies[row][t] = -(table[t - 1].exp() * table[t - 1]).sum()
    return torch.stack([torch.stack(r) for r in logprobs]), torch.stack([torch.stack(r) for r in entropies])


def by_scorer(made: Scorer) -> tuple[Tensor, Tensor]:
    tokens, mask, wanted = rows()
    logprobs, entropies = made(inputs(tokens, mask, wanted, TEMPERATURE, made.layout))
    return unpack(logprobs, wanted), unpack(entropies, wanted)


Scored = tuple[Tensor, Tensor, dict[str, Tensor]]


def with_gradient(model: Any, scores: tuple[Tensor, Tensor]) -> Scored:
    """The scores, and the gradient of a sum of both with random weights."""
    draw = torch.Generator().manual_seed(2)
    model.zero_grad()
    sum((part * torch.randn(part.shape, generator=draw)).sum() for part in scores).backward()
    return *(part.detach() for part in scores), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [*PACKED, *PADDED])
def test_scores_and_gradients_are_those_of_the_logits(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = network(name)
    expected = with_gradient(model, by_logits(model))
    with caplog.at_level(logging.INFO, logger="rft"):
        made = scorer(model)
    assert made.layout == ("packed" if name in PACKED else "padded")
    assert type(model).__name__ in caplog.text
    assert caplog.records[-1].levelno == (logging.INFO if name in PACKED else logging.WARNING)
    assert_same(with_gradient(model, by_scorer(made)), expected)


@pytest.mark.parametrize("name", PACKED)
def test_padded_they_are_the_same(name: str) -> None:
    model = network(name)
    as_packed = with_gradient(model, by_scorer(scorer(model)))
    model.set_attn_implementation("sdpa")
    assert_same(with_gradient(model, by_scorer(Scorer(model, "padded"))), as_packed)


def assert_same(got: Scored, expected: Scored) -> None:
    for one, other in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert got[2].keys() == expected[2].keys()
    for parameter, gradient in expected[2].items():
        torch.testing.assert_close(got[2][parameter], gradient, atol=1e-5, rtol=1e-5, msg=parameter)


def test_temperature_zero_is_temperature_one() -> None:
    made = scorer(network("granite"))  # where a scale stands between logits and temperature
    tokens, mask, wanted = rows()
    cold, warm = (made(inputs(tokens, mask, wanted, torch.full((len(LENGTHS),), heat), made.layout)) for heat in (0.0, 1.0))
    assert all(torch.equal(one, other) for one, other in zip(cold, warm, strict=True))


def test_a_model_whose_rows_touch_each_other_is_padded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def over_all(query: Tensor, key: Tensor, value: Tensor, where: Any, scaling: float | None) -> Tensor:
        del where, scaling
        heads = (part.transpose(0, 1)[None] for part in (query, key, value))
        return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    monkeypatch.setattr(packed, "_by_row", over_all)
    model = network("llama")
    expected = by_logits(model)
    made = scorer(model)
    assert made.layout == "padded"
    assert "LlamaForCausalLM cannot take packed rows, they are padded: they touch each other" in caplog.text
    for one, other in zip(by_scorer(made), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_a_model_that_does_more_to_its_logits_is_refused() -> None:
    model = network("llama")
    model.lm_head.register_forward_hook(lambda _module, _args, logits: logits * 1.01)
    with pytest.raises(BadInput, match="LlamaForCausalLM does more to its logits"):
        scorer(model)


def test_a_head_that_is_no_linear_layer_is_refused() -> None:
    model = network("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(BadInput, match="LlamaForCausalLM has no linear head"):
        scorer(model)


def test_padding_and_prompts_never_reach_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counting(hidden: Tensor, *rest: Any, **options: Any) -> Any:
        asked.append(len(hidden))
        return head_scores(hidden, *rest, **options)

    made = scorer(network("llama"))
    monkeypatch.setattr("rft.trainers.scorer.head_scores", counting)
    by_scorer(made)
    assert asked == [int(rows()[2].sum())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_packed_rows_is_that_of_each_row(dtype: torch.dtype) -> None:
    """Queries of four heads, keys and values of two."""
    where = segments(rows()[1])
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), 8).to(dtype) for heads in (4, 2, 2))
    mixed, _ = packed.attention(nn.Identity(), query, key, value, None, segments=where, scaling=0.3)
    for first, last in itertools.pairwise(where.bounds.tolist()):
        q, k, v = (part[:, :, first:last].double() for part in (query, key, value))
        expected = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(mixed[:, first:last].double(), expected, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"sliding_window": 4}, "sliding_window"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"is_causal": False}, "is_causal=False"),
        ({"attention_mask": torch.ones(1, 1, 24, 24)}, "attention_mask"),
        ({"segments": None}, "no segments"),
    ],
)
def test_attention_that_is_not_understood_is_not_computed(given: dict[str, Any], word: str) -> None:
    part = torch.zeros(1, 4, sum(LENGTHS), 8)
    options: dict[str, Any] = {"attention_mask": None, "segments": segments(rows()[1]), "dropout": 0.0, "position_ids": part, **given}
    with pytest.raises(packed.CannotPack, match=f"Identity is given {word}"):
        packed.attention(nn.Identity(), part, part, part, **options)


VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    "qwen3_vl": {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "deepstack_visual_indexes": [0],
    },
}
PATCHES = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
MARKS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 88, "vision_end_token_id": 89}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def seeing_network(name: str) -> Any:
    """One that takes images, all of its weights random."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, marks = {**SIZES, "rope_parameters": ROPE}, {**MARKS, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(name, text_config=text, vision_config={**VISION[name], **PATCHES}, **marks)
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    return model.eval()


def test_a_model_that_takes_images_is_tried_with_one() -> None:
    assert scorer(seeing_network("qwen2_vl")).layout == "packed"
    with pytest.raises(BadInput, match="Qwen3VLForConditionalGeneration does more with images than to put their features in the places of"):
        scorer(seeing_network("qwen3_vl"))

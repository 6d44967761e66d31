"""Frozen models of the Actor's kind and local reward models, on one and on two ranks, against plain transformers."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rft.models import find_model
from rft.testing.models import tiny_model
from tests.launching import torchrun
from tests.trainers import oracle
from tests.trainers.batches import random_experience
from tests.trainers.judges import IDLE, REPLIES, SHARES, WORDS, given, other_tokenizer, plain_scores, random_rollouts, tiny_judge

SCRIPT = Path(__file__).with_name("frozen_ranks.py")
RANKS = [
    pytest.param(2, id="2 ranks"),
    pytest.param(1, id="1 rank", marks=pytest.mark.slow),
    pytest.param(4, id="4 ranks", marks=pytest.mark.slow),
]


def make_models(folder: Path) -> None:
    """An Actor, what may stand beside it, and what may not."""
    from transformers import AutoTokenizer

    tiny_model(folder / "actor")
    tiny_model(folder / "other weights", seed=1)
    tiny_model(folder / "llama", "llama")
    tiny_model(folder / "larger vocabulary", vocab=321)
    other_tokenizer(template=True).save_pretrained(tiny_model(folder / "other tokenizer"))
    (tiny_model(folder / "broken") / "model.safetensors").write_bytes(b"no tensors")
    tiny_judge(folder / "classifier")
    larger: Any = AutoTokenizer.from_pretrained(folder / "actor")
    larger.add_tokens(["<|score|>"])
    tiny_judge(folder / "scalar head", "TokenClassification", "llama", tokenizer=larger)
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
    tiny_judge(folder / "windowed", **window)
    tiny_judge(folder / "other words", tokenizer=other_tokenizer(template=False))
    tiny_judge(folder / "other words in a template", tokenizer=other_tokenizer(template=True))
    tiny_judge(folder / "short", max_position_embeddings=12)
    tiny_judge(folder / "two labels", labels=2)
    config = tiny_model(folder / "no head") / "config.json"
    classifier = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "score"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | classifier))
    broken = other_tokenizer(template=True)
    broken.chat_template = "{{ raise_exception('only questions') }}"
    tiny_judge(folder / "broken template", tokenizer=broken)
    for file in tiny_judge(folder / "no tokenizer").glob("*token*"):
        file.unlink()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture(scope="module", params=RANKS)
def seen(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank saw, in rank order."""
    folder, ranks = tmp_path_factory.mktemp("results"), request.param
    _ = torchrun(SCRIPT, models, folder, ranks=ranks, timeout=300)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) | {"folder": folder} for rank in range(ranks)]


def sharings(ranks: int) -> list[str]:
    """In how many parts frozen models were held."""
    return ["None", "1", *(["2"] if ranks == 4 else [])]


# ---- the Reference ----


@functools.cache
def plain_logprobs(folder: Path, temperature: float) -> Tensor:
    return oracle.all_logprobs(oracle.plain_model(folder), random_experience(temperature=temperature))


def test_a_reference_gives_the_log_probs_of_its_own_weights(seen: list[dict[str, Any]], models: Path) -> None:
    for rank, result in enumerate(seen):
        for shards in sharings(len(seen)):
            own, idle = result["reference"][shards]
            rows = list(SHARES[len(seen)][rank])
            torch.testing.assert_close(own, plain_logprobs(models / "other weights", 0.7)[rows], atol=1e-5, rtol=0)
            rows = list(IDLE[len(seen)][rank])
            torch.testing.assert_close(idle, plain_logprobs(models / "other weights", 1.0)[rows], atol=1e-5, rtol=0)


def test_it_takes_no_more_than_its_share_of_the_device(seen: list[dict[str, Any]], models: Path) -> None:
    whole = sum(p.numel() * 4 for p in oracle.plain_model(models / "other weights").parameters())
    for shards in sharings(len(seen)):
        parts = len(seen) if shards == "None" else int(shards)
        assert {rank["reference"][f"bytes {shards}"] for rank in seen} == {whole // parts}


def test_before_training_it_is_the_actor_bit_for_bit(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        for dtype, (dtypes, (reference, actor)) in zip((torch.float32, torch.bfloat16), rank["beside_the_actor"], strict=True):
            assert dtypes == {dtype}
            assert torch.equal(reference, actor)


# ---- the moving average ----


def test_the_average_is_that_of_a_plain_loop(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        for shards in sharings(len(seen)):
            result = rank["average"][f"float32 {shards}"]
            expected = {name: tensor.double() for name, tensor in result["first"].items()}
            for step in range(5):
                new = given(result["first"], step)
                expected = {name: 0.9 * old + 0.1 * new[name] for name, old in expected.items()}
            for name, tensor in result["last"].items():
                torch.testing.assert_close(tensor.double(), expected[name], atol=1e-6, rtol=0)


def test_an_average_in_bfloat16_stays_near(seen: list[dict[str, Any]]) -> None:
    rough, exact = seen[0]["average"]["bfloat16 None"]["last"], seen[0]["average"]["float32 None"]["last"]
    assert {tensor.dtype for tensor in rough.values()} == {torch.bfloat16}
    assert 1e-4 < oracle.distance({name: tensor.float() for name, tensor in rough.items()}, exact) < 0.02


def test_what_an_average_saves_is_all_of_it(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        for result in rank["average"].values():
            assert result["saved"].keys() == result["last"].keys()
            for name, tensor in result["last"].items():
                assert torch.equal(result["saved"][name], tensor)
                assert torch.equal(result["copy"][name], tensor)


def test_an_average_is_exported_from_the_host(seen: list[dict[str, Any]], models: Path) -> None:
    loaded = oracle.plain_model(seen[0]["folder"] / "exported")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.detach(), seen[0]["export"][name])
    original, copy = find_model(str(models / "actor")), find_model(str(seen[0]["folder"] / "exported"))
    assert copy.tokenizer.chat_template == original.tokenizer.chat_template
    assert copy.tokenizer("What is 2 + 3?")["input_ids"] == original.tokenizer("What is 2 + 3?")["input_ids"]


# ---- placement ----


def test_models_that_take_turns_take_the_memory_of_one(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        result = rank["turns"]
        assert result["nothing"] == 0
        assert set(result["taken"]) == {result["alone"]} == {result["bytes"]}


def test_many_turns_change_nothing(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert all(rank["turns"]["same"])
        for before, after in zip(rank["turns"]["before"], rank["turns"]["after"], strict=True):
            assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_on_the_host_is_not_used(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["turns"]["refused"] == ["RoleError: this Reference lies on the host; reload it first"] * 2


# ---- what is refused ----


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("reference llama", "is not of the kind of the Actor, * it is a Llama, and the other a Qwen2"),
        (
            "reference larger vocabulary",
            "1 of its tensors differ from the other's, such as: model.embed_tokens.weight is (321, 128) and (320, 128)",
        ),
        ("reference other tokenizer", "its tokenizer has another number for 258 of the other's 259 tokens, such as: '!' is 257 and 0"),
        ("reference nowhere", "is neither a folder nor a model that the hub gives"),
        ("reference broken", "the weights in * cannot be loaded"),
        ("reference three shards", "shards=3 does not divide the world size"),
        ("judge actor", "is a Qwen2ForCausalLM, and must be a …ForSequenceClassification or …ForTokenClassification with one label"),
        ("judge two labels", "has 2 labels, and must have 1: its score"),
        ("judge no head", "lacks weights, or has them in another shape: score.weight (1 in all)"),
        ("judge no tokenizer", "has no tokenizer"),
        ("judge broken template", "TemplateError: only questions"),
        ("judge nowhere", "is neither a folder nor a model that the hub gives"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks(what: str, says: str, seen: list[dict[str, Any]]) -> None:
    for message in (rank["refusals"][what] for rank in seen):
        assert message.startswith("BadInput: ")
        assert all(part in message for part in says.split("*")), message


def test_what_is_missing_on_one_rank_is_refused_on_all(seen: list[dict[str, Any]]) -> None:
    for message in (rank["refusals"]["reference nowhere on rank 0"] for rank in seen):
        assert message.startswith("BadInput: rank 0: " if len(seen) > 1 else "BadInput: ")
        assert "nowhere' is neither a folder" in message


# ---- reward models ----


@functools.cache
def expected_scores(folder: Path) -> Tensor:
    """Of all rows, by plain forwards over what each model is to be given."""
    from transformers import AutoTokenizer

    rollouts = random_rollouts(*range(8))
    rows = [tokens[mask].tolist() for tokens, mask in zip(rollouts.tokens, rollouts.mask, strict=True)]
    if folder.name.startswith("other words"):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        texts = [(f"user: {question}<|end|>assistant: {response}<|end|>") for question, response in zip(WORDS, REPLIES, strict=True)]
        rows = [tokenizer(text)["input_ids"] for text in texts]
        if tokenizer.chat_template is None:
            rows = [
                tokenizer(question)["input_ids"] + tokenizer(response)["input_ids"]
                for question, response in zip(WORDS, REPLIES, strict=True)
            ]
    return plain_scores(folder, rows)


@pytest.mark.parametrize("name", ["classifier", "scalar head", "windowed", "other words", "other words in a template"])
def test_scores_are_those_of_a_plain_forward(name: str, seen: list[dict[str, Any]], models: Path) -> None:
    expected = expected_scores(models / name)
    for rank, result in enumerate(seen):
        for shards in sharings(len(seen)) if name == "classifier" else ["None"]:
            own, idle = result["judges"][f"{name} {shards}"]
            torch.testing.assert_close(own, expected[list(SHARES[len(seen)][rank])], atol=1e-5, rtol=0)
            torch.testing.assert_close(idle, expected[list(IDLE[len(seen)][rank])], atol=1e-5, rtol=0)
        assert result["judges"][f"{name} layout"] == ("padded" if name == "windowed" else "packed")


def test_a_reward_model_comes_back_from_the_host_as_it_went(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        for name in ("classifier", "scalar head", "windowed"):
            refused, scores = rank["judges"][f"{name} again"]
            assert refused == "RoleError: this RewardModel lies on the host; reload it first"
            assert torch.equal(scores, rank["judges"][f"{name} None"][0])


def test_in_bfloat16_the_head_is_still_exact(seen: list[dict[str, Any]], models: Path) -> None:
    expected = expected_scores(models / "classifier")
    for rank, result in enumerate(seen):
        assert result["judges"]["dtypes"] == ({torch.float32}, {torch.bfloat16})
        torch.testing.assert_close(result["judges"]["bfloat16"], expected[list(SHARES[len(seen)][rank])], atol=0.06, rtol=0)


def test_a_row_that_is_too_long_has_no_score(seen: list[dict[str, Any]], models: Path) -> None:
    lengths, expected = random_experience().mask.sum(dim=1), expected_scores(models / "short")
    for rank, result in enumerate(seen):
        for row, score in zip(SHARES[len(seen)][rank], result["short_judge"], strict=True):
            assert torch.isnan(score) if lengths[row] > 12 else abs(score - expected[row]) < 1e-5

"""What every trainer must do, on one and on two ranks: it is held against a plain single-process loop on the same global batch.

A test file takes all of it (`from tests.trainers.contract import *`) and makes of `launched` a fixture `seen`, for its backends and ranks.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rft.models import find_model
from rft.narrow import shape_in
from rft.ops.aggregation import Totals
from rft.spec import FSDP2Trainer
from rft.testing.models import tiny_model
from rft.trainers.schedule import learning_rate
from tests.launching import torchrun
from tests.trainers import oracle, parcels
from tests.trainers.backends import shards
from tests.trainers.batches import random_experience, some_old

SCRIPT = Path(__file__).with_name("ranks.py")
SOURCE = random_experience()
OLD = some_old(SOURCE, torch.where(SOURCE.sampled, -6.0, 0.0))
SHARES = {
    1: [range(8)],
    2: [range(5), range(5, 8)],
    3: [range(3), range(3, 4), range(4, 8)],
    4: [range(2), range(2, 3), range(3, 5), range(5, 8)],
}
# At the usual epsilon AdamW makes steps of gradients that are nothing but rounding.
FIVE_STEPS = FSDP2Trainer(lr=1e-3, eps=1e-7, weight_decay=0.1, schedule="cosine", warmup_steps=1, total_steps=9)
EXACT = [
    "whole", "row by row", "a few rows", "checkpointed", "an idle rank", "first step", "uneven shards", "a constant loss",
    "mixed temperatures", "padded", "padded, checkpointed",
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model, one with a head of its own that two ranks cannot share evenly, one stored in bf16, and one whose rows are padded."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "qwen2", "qwen2", tied=True)
    tiny_model(folder / "uneven", "llama", tied=False, vocab=321)
    tiny_model(folder / "half", "qwen2", layers=1, dtype=torch.bfloat16)
    config = tiny_model(folder / "windowed", "qwen2") / "config.json"
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | window))
    torch.save(plain_states(folder / "uneven")[2], folder / "plain.pt")
    return folder


@pytest.fixture(scope="module")
def launched(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, tuple[str, ...]], Path]:
    """Runs all scenes of some backends on some ranks, once; and gives the folder of results."""

    @functools.cache
    def launch(ranks: int, backends: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("results")
        torchrun(SCRIPT, models, folder, *backends, ranks=ranks, timeout=300)
        return folder

    return launch


def cases(launches: Sequence[tuple[int, tuple[str, ...], str]]) -> list[Any]:
    """The parameters of a fixture `seen`: ranks, what is launched together, and the one of them that is looked at."""
    return [
        pytest.param((ranks, together, backend), id=f"{backend} on {ranks}", marks=[pytest.mark.slow] if pace == "slow" else [])
        for ranks, together, pace in launches
        for backend in together
        if ";" not in backend
    ]


def results(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What every rank saw, in rank order; where, under `folder`; and the name of the backend."""
    seen = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    return [rank | {"folder": folder, "backend": folder.name} for rank in seen]


def plain_steps(network: Any, count: int, optimizer: Any = None) -> Iterator[tuple[Tensor, dict[str, float]]]:
    """Steps a plain model; before each, its log-probs, and after it the loss, the gradient's norm and the learning rate."""
    spec = FIVE_STEPS
    optimizer = optimizer or torch.optim.AdamW(network.parameters(), 0.0, spec.betas, spec.eps, spec.weight_decay, foreach=False)
    for step in range(count):
        before = oracle.all_logprobs(network, SOURCE)
        loss = oracle.plain_loss(network, SOURCE, OLD)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr = learning_rate(spec, step)
        optimizer.step()
        yield before, {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr}


def plain_states(folder: Path) -> list[dict[str, Tensor]]:
    """What a plain loop would save, before any step and after each of three."""
    network, spec = oracle.plain_model(folder), FIVE_STEPS
    optimizer = torch.optim.AdamW(network.parameters(), 0.0, spec.betas, spec.eps, spec.weight_decay, foreach=False)
    before = oracle.saved(network, optimizer)
    return [before, *(oracle.saved(network, optimizer) for _ in plain_steps(network, 3, optimizer))]


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def plain(models: Path) -> dict[str, tuple[dict[str, Tensor], float]]:
    """Gradient and loss of the plain loop."""
    result = {}
    cases = (
        ("tied", "qwen2", SOURCE, OLD),
        ("first step", "qwen2", SOURCE, None),
        ("uneven shards", "uneven", SOURCE, OLD),
        ("mixed temperatures", "qwen2", random_experience(temperature=None), OLD),
        ("padded", "windowed", SOURCE, OLD),
        ("padded, checkpointed", "windowed", SOURCE, OLD),
    )
    for name, model, source, old in cases:
        network = oracle.plain_model(models / model)
        loss = oracle.plain_loss(network, source, old)
        loss.backward()
        result[name] = (oracle.gradient(network), loss.item())
    return result


@pytest.mark.parametrize("case", EXACT)
def test_the_gradient_is_that_of_a_plain_loop(case: str, seen: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    expected, loss = plain.get(case, plain["tied"])
    for result in (rank["gradients"][case] for rank in seen):
        assert oracle.distance(result["gradient"], expected) <= 1e-5
        assert result["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
        assert result["metrics"]["grad_norm"] == pytest.approx(oracle.norm(expected), rel=1e-5)


def test_bfloat16_stays_near(seen: list[dict[str, Any]], plain: dict[str, Any]) -> None:
    expected, loss = plain["first step"]  # where no token stands at the clip, which rounding would push over it
    result = seen[0]["gradients"]["bfloat16"]
    assert 1e-4 < oracle.distance(result["gradient"], expected) < 0.05
    assert result["metrics"]["loss"] == pytest.approx(loss, abs=0.05)


def test_bfloat16_computes_in_bfloat16_with_float32_masters(seen: list[dict[str, Any]], models: Path) -> None:
    assert set(seen[0]["compute_dtype"]["dtypes"]) == {torch.bfloat16}
    assert set(seen[0]["compute_dtype"]["masters"]) == {torch.float32}
    assert same(seen[0]["compute_dtype"]["stored"], load_file(models / "qwen2" / "model.safetensors"))  # not rounded on the way


def test_micro_batches_add_up_in_float32(seen: list[dict[str, Any]]) -> None:
    many, one = seen[0]["many_equal_micro_batches"]
    assert oracle.distance(many, one) < 1e-6  # in bf16 the sum of 32 would be off by 1e-3 and more


def test_all_metrics_are_those_of_the_global_batch(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["gradients"]["whole"]["metrics"] == seen[0]["gradients"]["whole"]["metrics"]
        for case in EXACT[:5]:
            assert rank["gradients"][case]["metrics"] == pytest.approx(seen[0]["gradients"]["whole"]["metrics"], rel=1e-4)
    assert seen[0]["gradients"]["first step"]["metrics"]["ratio_mean"] == pytest.approx(1.0)


def test_metrics_add_up_or_merge_over_micro_batches_and_ranks(seen: list[dict[str, Any]], models: Path) -> None:
    entropies = oracle.all_entropies(oracle.plain_model(models / "qwen2"), SOURCE)[SOURCE.sampled]
    expected = {"most": entropies.max().item(), "tokens": len(entropies), "sum": entropies.sum().item(), "row 4": 8}
    for told in (told for rank in seen for told in rank["metrics"]):
        assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_the_first_ratio_is_exactly_one(seen: list[dict[str, Any]]) -> None:
    for metrics in (metrics for rank in seen for metrics in rank["first_steps"]):
        assert metrics["kl"] == 0.0
        assert metrics["clip_fraction"] == 0.0
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-6)  # a sum of many ones, each divided by their number


def test_an_objective_is_told_of_the_whole_batch(seen: list[dict[str, Any]]) -> None:
    # 5 + 8 + 4 + 10 + 3 + 3 sampled tokens in six rows, and 8 of the demonstrated row.
    for told in (rank["totals_of_the_batch"] for rank in seen):
        assert set(map(str, told)) == {str(Totals(tokens=33, sequences=6, demonstrated=8))}


def test_five_steps_are_those_of_a_plain_loop(seen: list[dict[str, Any]], models: Path) -> None:
    network = oracle.plain_model(models / "qwen2")
    for step, (before, told) in enumerate(plain_steps(network, 5)):
        for rows, rank in zip(SHARES[len(seen)], seen, strict=True):
            result = rank["five_steps"]["steps"][step]
            torch.testing.assert_close(result["logprobs"], before[list(rows)], atol=5e-5, rtol=5e-5)
            assert {name: result[name] for name in told} == pytest.approx(told, rel=1e-4, abs=1e-5)
    expected = {name: p.detach() for name, p in network.named_parameters()}
    assert oracle.distance(seen[0]["five_steps"]["weights"], expected) < 1e-5


def test_supervised_steps_learn(seen: list[dict[str, Any]], models: Path) -> None:
    table = oracle.all_logprobs(oracle.plain_model(models / "qwen2"), SOURCE)
    losses = [metrics["loss"] for metrics in seen[0]["supervised_steps"]]
    assert losses[0] == pytest.approx(-table[SOURCE.sampled].mean().item(), rel=1e-5)
    assert losses == sorted(losses, reverse=True)


def test_logprobs_on_ranks_with_different_rows(seen: list[dict[str, Any]], models: Path) -> None:
    network = oracle.plain_model(models / "qwen2")
    for rows, rank in zip(SHARES[len(seen)], seen, strict=True):
        some, idle, nothing = rank["logprobs"]
        assert some.dtype == torch.float32
        torch.testing.assert_close(some, at_temperature(network, 0.7)[list(rows)], atol=1e-5, rtol=0)
        assert nothing.shape == (0, SOURCE.tokens.shape[1])
        assert len(idle) in (0, len(SOURCE))
    torch.testing.assert_close(seen[0]["logprobs"][1], at_temperature(network, 1.0) * SOURCE.sampled, atol=1e-5, rtol=0)


def at_temperature(network: Any, temperature: float) -> Tensor:
    return oracle.all_logprobs(network, random_experience(temperature=temperature))


@pytest.mark.parametrize("model", ["qwen2", "uneven"])
def test_weights_stream_under_the_checkpoint_s_names(model: str, seen: list[dict[str, Any]], models: Path) -> None:
    stored = load_file(models / model / "model.safetensors")
    for rank in seen:
        result = rank["streams"][model]
        assert same(result["weights"], stored)
        assert same(result["small buckets"], stored)
        listed = [(spec.name, spec.shape, spec.dtype) for spec in result["manifest"]]
        assert listed == [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in result["weights"].items()]


@pytest.mark.parametrize("model", ["qwen2", "uneven"])
def test_what_travels_may_be_cast_before_and_has_the_bits_of_a_cast_afterwards(
    model: str, seen: list[dict[str, Any]], models: Path
) -> None:
    stored = load_file(models / model / "model.safetensors")
    for number, rank in enumerate(seen):
        result, dtype = rank["streams"][model], torch.bfloat16 if travels(rank["backend"], len(seen)) else torch.float32
        for kind in ("cast", "cast, small buckets", "cast, from host"):
            assert same(result[kind], {name: tensor.to(dtype) for name, tensor in stored.items()})
            assert {tensor.dtype for tensor in result[kind].values()} == {dtype}
        cut = parcels.slices({name: tuple(tensor.shape) for name, tensor in stored.items()}, number)
        assert same(result["cut"], {name: (cut[name].of(t) if name in cut else t).to(dtype) for name, t in stored.items()})
        listed = [(spec.name, spec.shape, spec.dtype) for spec in result["cast manifest"]]
        assert listed == [(name, tuple(tensor.shape), dtype) for name, tensor in result["cast"].items()]


def travels(backend: str, ranks: int) -> bool:
    """Whether weights are sent from rank to rank to be whole."""
    return (shards(backend) or ranks) > 1 if backend.startswith("fsdp2") else "3" in backend and ranks > 1


def test_tensors_cut_anyhow_are_put_together_bit_by_bit(seen: list[dict[str, Any]]) -> None:
    whole = parcels.tensors()
    for rank in seen:
        for kind in ("gathered", "assembled"):
            for (_, dtype), got in rank["gathers"][kind].items():
                narrower = len(seen) > 1 and dtype is not None
                expected = {
                    name: tensor.to(dtype) if narrower and tensor.dtype == torch.float32 else tensor for name, tensor in whole.items()
                }
                assert {name: tensor.dtype for name, tensor in got.items() if name in whole} == {n: t.dtype for n, t in expected.items()}
                assert same({name: tensor for name, tensor in got.items() if name != "number"}, expected)
                assert list(got) == [*whole, *(["number"] if kind == "assembled" else [])]
                assert kind == "gathered" or (got["number"].shape, float(got["number"])) == (torch.Size(()), 2.5)


def test_each_rank_gets_what_it_wants_of_a_tensor_and_no_more(seen: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(seen):
        narrows = parcels.wanted(number)
        for kind, whole in (("narrowed", "gathered"), ("narrowed stretches", "assembled")):
            for key, got in rank["gathers"][kind].items():
                all_of_it = rank["gathers"][whole][key]
                assert list(got) == list(all_of_it)
                assert {n: t.shape for n, t in got.items()} == {n: shape_in(narrows, n, t.shape) for n, t in all_of_it.items()}
                assert same(got, {n: narrows[n].of(t) if n in narrows else t for n, t in all_of_it.items()})
        cut = sum((narrows[name].of(tensor) if name in narrows else tensor).nbytes for name, tensor in parcels.tensors().items())
        assert rank["gathers"]["arriving"] <= (cut + parcels.SLOTS * len(seen) if len(seen) > 1 else 0)


def test_a_reader_that_stops_leaves_no_collective_behind(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        for stop, result in zip(parcels.STOPS, rank["gathers"]["stopped"], strict=False):
            assert result["names"] == parcels.many(len(seen))[:stop]
            assert sum(result["ahead"]) == len(result["ahead"]) - bool(stop)  # while one bucket is read, the next one is on its way
            assert all(result["waited"])
            assert len(result["waited"]) <= stop + 1
            assert result["sum"] == sum(range(len(seen)))
        assert same(rank["gathers"]["afterwards"], parcels.tensors())


def test_a_stream_begins_before_all_of_its_parts_are_asked_for(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        for asked in rank["gathers"]["asked"]:
            names = parcels.many(len(seen))
            assert asked == names[: len(asked)]
            assert 0 < len(asked) < len(names)


def test_going_to_the_host_and_back_changes_nothing(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        result = rank["placement"]
        assert [what.split(":")[0] for what in result["refused"]] == ["RoleError", "RoleError"]
        assert "optimizer" in result["refused"][0]
        assert not any(result["held"])  # the storage is empty, not just hidden
        assert result["sizes"] == result["after"]
        for away, still in result["streams"]:
            assert same(away, still)
        assert result["metrics"][0] == result["metrics"][1]
        assert same(*result["weights"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_goes_on_from_what_another_saved(dtype: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        result = rank["checkpoints"][dtype]
        assert result["same"] == dict.fromkeys(("from host", "installed", "metrics", "after", "weights"), True)
        assert {t.dtype for name, t in result["kept"].items() if name != "optimizer.steps"} == {torch.float32}
        assert same(result["kept"], seen[0]["checkpoints"][dtype]["kept"])


def test_what_is_saved_depends_on_no_backend_and_no_number_of_ranks(seen: list[dict[str, Any]], models: Path) -> None:
    states = plain_states(models / "uneven")
    for rank in seen:
        kept, result = rank["checkpoints"]["float32"]["kept"], rank["from_elsewhere"]
        assert same(result["installed"], states[2])
        for got, expected in ((kept, states[2]), (result["after"], states[3])):
            assert got["optimizer.steps"] == expected["optimizer.steps"]
            for kind in ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
                one, other = ({n: t for n, t in state.items() if n.startswith(kind)} for state in (got, expected))
                assert oracle.distance(one, other) < 1e-5


def test_export_is_an_ordinary_folder(seen: list[dict[str, Any]], models: Path) -> None:
    folder = seen[0]["folder"] / "exported"
    assert sorted(path.name for path in folder.iterdir()) == ["half", "qwen2", "uneven"]  # nothing is left of what was written aside
    for model in ("qwen2", "uneven"):
        loaded = oracle.plain_model(folder / model)
        assert same({name: p.detach() for name, p in loaded.named_parameters()}, seen[0]["export"][model])
        original, copy = find_model(str(models / model)), find_model(str(folder / model))
        assert copy.config.to_dict() == original.config.to_dict() | {"_name_or_path": str(folder / model)}
        assert copy.tokenizer.chat_template == original.tokenizer.chat_template
        assert copy.tokenizer("What is 2 + 3?")["input_ids"] == original.tokenizer("What is 2 + 3?")["input_ids"]
        assert loaded.generation_config.eos_token_id == 257


def test_export_keeps_the_dtype_that_the_model_came_in(seen: list[dict[str, Any]]) -> None:
    stored = load_file(seen[0]["folder"] / "exported" / "half" / "model.safetensors")
    masters = seen[0]["export"]["half"]
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert same(stored, {name: tensor.bfloat16() for name, tensor in masters.items()})


def test_a_gradient_that_is_not_finite_is_refused_before_anything_moves(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        result = rank["not_finite"]
        assert "nan" in result["refused"][0]
        assert same(*result["untouched"])
        assert result["metrics"][0] == result["metrics"][1]
        assert same(*result["weights"])


def test_bad_batches_are_refused_on_all_ranks(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        nothing, hole, early, hole_again, two_kinds, short, metrics = rank["bad_batches"]
        assert "nothing to learn" in nothing[0]
        wrong = ((hole, "hole"), (early, "column 0 cannot be sampled"), (hole_again, "hole"), (short, "padding cannot be sampled"))
        for refusal, word in wrong:
            assert f"rank {len(seen) - 1}: " in refusal[0]
            assert word in refusal[0]
        assert len(seen) == 1 or "metric 'most' is a Tensor here and a Maximum there" in two_kinds[0]
        assert metrics == pytest.approx(rank["gradients"]["first step"]["metrics"], rel=1e-4, abs=1e-6)  # nothing of them stayed


def test_what_cannot_work_is_refused_at_launch_on_all_ranks(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        unread, *others = rank["refused_at_launch"]
        assert unread == "BadInput: rank 0 finds no weights"
        if seen[0]["backend"].startswith("fsdp2"):
            words = [(f"shards={len(seen) + 1}", f"world size {len(seen)}")]
        else:
            words = [("MissingBackend", "0.19.7+abc", "0.19.8"), ("BadInput", "has chosen cpu", "cuda:0", "DS_ACCELERATOR=cuda")]
        for told, expected in zip(others, words, strict=True):
            assert all(word in told for word in expected)


def test_an_objective_that_fails_at_once_is_refused_and_nothing_is_left_of_it(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        result = rank["failing_objective"]
        assert f"nothing was changed; rank {len(seen) - 1}: ShapeError: " in result["refused"][0]
        assert result["metrics"][0] == result["metrics"][1]
        assert same(*result["weights"])


def test_an_objective_that_fails_later_in_a_step_is_no_refusal(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert (
            "in the middle of a step, after earlier micro-batches; BadInput: an objective's loss is a scalar"
            in (rank["failing_objective"]["poisoned"][0])
        )

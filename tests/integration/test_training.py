"""Five steps of the whole runtime on two ranks, against a plain loop in one process that shares no code with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rft.testing.models import tiny_model
from tests.integration.job import EPS, LR, SAMPLING, STEPS
from tests.launching import torchrun

ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)]
JOB = Path(__file__).with_name("job.py")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loop", ["sleeping", "never-sleeping"])
def test_two_ranks_train_what_a_plain_loop_trains(tmp_path: Path, engine: str, loop: str) -> None:
    folder = tiny_model(tmp_path / "tiny")
    _ = torchrun(JOB, folder, tmp_path, engine, loop, timeout=240)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), LR, (0.9, 0.999), EPS, 0.0)
    for step in range(STEPS):
        rows = [row for rank in ranks for row in _rows(rank["seen"][step])]
        for row in rows:
            plain = _logprobs(model, row["tokens"]).detach()
            mask = row["sampled"]
            assert torch.allclose(row["old"][mask], plain[mask], atol=1e-4), "the Actor's log-probs"
            assert torch.allclose(row["engine"][mask], plain[mask], atol=1e-4), "the engine's log-probs"
        loss, norm = _plain_step(model, optimizer, rows)
        for rank in ranks:
            metrics = rank["seen"][step]["metrics"]
            assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
            assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    for rank in ranks:
        assert len(rank["gaps"]) >= STEPS
        assert max(rank["gaps"]) < 1e-5, "engine and Actor agree on the probe after every broadcast"
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for (name, ours), plain in zip(exported.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, plain, atol=2e-4), name


def _rows(seen: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    names = ("tokens", "sampled", "engine", "old", "advantages")
    return [{name: seen[name][row] for name in names} for row in range(len(seen["tokens"]))]


def _logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """One sequence at a time, by the definition: log softmax(logits / temperature), read at the next token."""
    logits = model(input_ids=tokens[None]).logits[0] / SAMPLING.temperature
    return torch.stack([torch.zeros(()), *(logits[t].log_softmax(-1)[tokens[t + 1]] for t in range(len(tokens) - 1))])


def _plain_step(model: Any, optimizer: torch.optim.Optimizer, rows: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    total = sum(int(row["sampled"].sum()) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        new = _logprobs(model, row["tokens"])
        ratio = (new - row["old"]).exp()
        value = torch.minimum(ratio * row["advantages"], ratio.clamp(0.8, 1.2) * row["advantages"])
        loss = loss - value[row["sampled"]].sum() / total
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()

"""A job with LoRA on one rank: the same long prompts are sampled, trained on, and sampled again, in every way to the next broadcast."""

import dataclasses as dc
from pathlib import Path
from typing import Any

import torch

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.effects.runtime import runtime_of
from rft.models import find_model
from rft.spec import LoRA, Reference
from rft.state import REFERENCE

SAMPLING = rft.Sampling(samples=2, max_new_tokens=8, temperature=1.0)
QUESTIONS = tuple(Question(id=i, text=f"{i} is long enough to be cached" * 3, answer=str(i)) for i in range(2))


@dc.dataclass
class Seen:
    """What a job samples each time, what its engine is sent, the gaps on the probe; and what the Reference says early and late."""

    tokens: list[torch.Tensor] = dc.field(default_factory=list)
    logprobs: list[torch.Tensor] = dc.field(default_factory=list)
    sent: list[str] = dc.field(default_factory=list)
    gaps: list[float] = dc.field(default_factory=list)
    reference: list[torch.Tensor] = dc.field(default_factory=list)


def cycle(folder: Path, engine: rft.EngineSpec, lora: LoRA) -> Seen:
    """Samples six times, with a step in between: the engine awake, asleep with its weights kept, and asleep with nothing left."""
    trainer = rft.FSDP2Trainer(dtype="float32", lr=0.02, eps=1e-4, lora=lora)
    data = tokenise(QUESTIONS, find_model(str(folder)).tokenizer, max_tokens=200)
    prompts, _ = next_prompts(data, Cursor(), len(QUESTIONS), Share())
    seen = Seen()
    spec = rft.LaunchSpec(model=str(folder), engine=engine, trainer=trainer, reference=Reference(), deadline_s=60)
    with rft.launch(spec) as state:
        _watch(runtime_of(state).engine, seen.sent)
        assert state.roles.of(REFERENCE).bytes == 0
        state = rft.refresh(state)
        first = rft.generate(state, prompts, SAMPLING)
        seen.reference.append(rft.reference_logprobs(state, first))
        for way in ("awake", "kept", "released", "awake", "released"):
            state = _learn(state, _sample(state, prompts, seen))
            state = rft.sleep(state) if way == "released" else rft.sleep_keeping(state) if way == "kept" else state
            state = rft.broadcast(state) if way == "awake" else rft.refresh(state)
        _ = _sample(state, prompts, seen)
        seen.reference.append(rft.reference_logprobs(state, first))
        seen.gaps = [gap.largest for gap in rft.health(state).gaps]
    return seen


def _sample(state: Any, prompts: rft.Prompts, seen: Seen) -> rft.Rollouts:
    rollouts = rft.generate(state, prompts, SAMPLING)
    seen.tokens.append(rollouts.tokens)
    seen.logprobs.append(rollouts.logprobs)
    return rollouts


def _learn(state: Any, rollouts: rft.Rollouts) -> Any:
    """One step towards even tokens."""
    better = torch.where(rollouts.tokens % 2 == 0, 1.0, -1.0) * rollouts.sampled
    experience = rft.experience(rollouts, torch.zeros(len(rollouts.tokens)), better)
    state = rft.compute_old_logprobs(state, rollouts)
    state, _ = rft.train_step(state, rft.take(experience, torch.arange(len(experience))), rft.grpo())
    return rft.finish_batch(state)


def _watch(engine: Any, sent: list[str]) -> None:
    for verb in ("load", "load_adapter"):
        if hasattr(engine, verb):
            setattr(engine, verb, _told(verb, getattr(engine, verb), sent))


def _told(verb: str, call: Any, sent: list[str]) -> Any:
    def told(tensors: Any) -> Any:
        sent.append(verb)
        return call(tensors)

    return told

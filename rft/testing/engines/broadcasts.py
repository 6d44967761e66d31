"""Steps over the engine: broadcasts that are whole, come again, or fail half-way; and what `generate` makes of seeds and samples."""

import contextlib
import dataclasses as dc
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import pytest
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from rft.effects.health import health
from rft.effects.launching import roles
from rft.effects.runtime import Runtime
from rft.engines.faults import Faults
from rft.engines.protocol import Engine
from rft.errors import EngineFailed, EnginePoisoned
from rft.experience import Prompts, Rollouts
from rft.images import RowImages
from rft.ledger import beginning
from rft.loops import refresh
from rft.models import ModelFolder
from rft.narrow import Narrows
from rft.parallel.lockstep import Lockstep
from rft.parallel.world import World
from rft.sampling import Sampling
from rft.spec import LaunchSpec
from rft.state import Asleep, Awake, Fresh, NoOld, OnDevice, RuntimeState, Stale, first_state
from rft.steps import broadcast, generate, recover, sleep, sleep_keeping, wake
from rft.testing.engines.base import Contract
from rft.testing.engines.oracle import PROMPTS, expected_logprobs, weights
from rft.testing.scripted import alone
from rft.trainers.protocol import TensorSpec
from rft.trainers.scripted import ScriptedTrainer

Breach = Literal[
    "nothing comes", "a tensor is missing", "a wrong shape", "a stream ends", "an acknowledgement is lost", "it arrives changed"
]
"""What may happen to a broadcast."""
BREACHES: tuple[Breach, ...] = get_args(Breach)
SAMPLED = Sampling(samples=3, max_new_tokens=12)
GREEDILY = Sampling(temperature=0, max_new_tokens=10)


class Sender(ScriptedTrainer):
    """A trainer that trains nothing: it has a module's weights to send, and scores by it. Exchange `module` for new weights."""

    def __init__(self, module: Any) -> None:
        super().__init__(Faults())
        self.module = module

    def manifest(self, dtype: torch.dtype | None = None) -> tuple[TensorSpec, ...]:
        """Of the module's weights, which come exact."""
        del dtype
        return tuple(TensorSpec(name=name, shape=tuple(given.shape), dtype=given.dtype) for name, given in weights(self.module).items())

    def stream_weights(self, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()) -> Iterator[tuple[str, Tensor]]:
        """The module's weights, whole."""
        del dtype
        assert not narrows
        yield from weights(self.module).items()

    @torch.no_grad()
    def logprobs(
        self,
        tokens: Int64[Tensor, "batch seq"],
        mask: Bool[Tensor, "batch seq"],
        wanted: Bool[Tensor, "batch seq"],
        temperature: float,
        images: RowImages | None = None,
    ) -> Float32[Tensor, "batch seq"]:
        """Of rows without padding."""
        assert images is None
        assert mask.all()
        scores = torch.zeros(tokens.shape)
        for row, ids in enumerate(tokens.tolist()):
            prompt, rest = tuple(ids[:1]), tuple(ids[1:])
            scores[row, 1:] = torch.tensor(expected_logprobs(self.module, prompt, rest, Sampling(temperature=temperature)))
        return scores * wanted


@beginning
def engine_launch(
    engine: Engine, sender: Sender, tokenizer: Any, *, world: World | None = None, seed: int = 0, deadline_s: float = 300.0
) -> Generator[RuntimeState[Asleep, Stale, OnDevice, NoOld]]:
    """Like `launch`, of an engine that is there already, and that stays when it is left; on one rank unless given a `world`."""
    world = world or alone()
    engine.sleep("release")
    runtime = Runtime(
        spec=LaunchSpec(model="module", engine=None, seed=seed, device_bytes=1 << 50),
        model=ModelFolder(Path("module"), None, tokenizer),
        world=world,
        trainer=sender,
        engine=engine,
        lockstep=Lockstep(world, deadline_s),
    )
    yield first_state(runtime, roles(runtime))


def prompts_of(rows: tuple[tuple[int, ...], ...] = PROMPTS, *, first: int = 0, step: int = 1, epoch: int = 0) -> Prompts:
    """Prompts that are numbered from `first` on, by `step`."""
    width = max(map(len, rows), default=0)
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64).reshape(len(rows), width)
    mask = torch.arange(width)[None, :] < torch.tensor([len(row) for row in rows], dtype=torch.int64)[:, None]
    ids = first + step * torch.arange(len(rows))
    names = tuple(f"prompt {number}" for number in ids.tolist())
    return Prompts(tokens=tokens, mask=mask, ids=ids, epoch=epoch, texts=names, answers=names)


def responses(rollouts: Rollouts) -> dict[tuple[int, int], tuple[int, ...]]:
    """The tokens that were sampled, by prompt and sample."""
    rows = zip(rollouts.groups.tolist(), rollouts.samples.tolist(), rollouts.tokens, rollouts.sampled, strict=True)
    return {(prompt, sample): tuple(tokens[sampled].tolist()) for prompt, sample, tokens, sampled in rows}


@contextlib.contextmanager
def breached(engine: Engine, sender: Sender, breach: Breach) -> Generator[None]:
    """While it lasts, broadcasts go wrong on this rank."""
    with contextlib.ExitStack() as stack:
        if breach in ("an acknowledgement is lost", "it arrives changed"):
            _ = stack.enter_context(mock.patch.object(engine, "checksums", _acknowledging(engine.checksums, breach)))
        else:
            _ = stack.enter_context(mock.patch.object(sender, "stream_weights", functools.partial(_stream, sender.module, breach)))
        yield


def _stream(module: Any, breach: Breach, dtype: torch.dtype | None = None, narrows: Sequence[Narrows] = ()) -> Iterator[tuple[str, Tensor]]:
    """Every fault is in the middle: something has come before, and more is to come."""
    del dtype, narrows
    whole = weights(module)
    middle = len(whole) // 2
    for number, (name, tensor) in enumerate(whole.items()):
        if number == middle and breach == "a stream ends":
            raise ConnectionError("a rank is gone")
        if breach == "nothing comes" or (number == middle and breach == "a tensor is missing"):
            continue
        yield name, tensor.new_zeros(tensor.numel() + 1) if number == middle and breach == "a wrong shape" else tensor


def _acknowledging(checksums: Callable[[], Any], breach: Breach) -> Callable[[], Any]:
    """Other ranks of its group may take part in what the engine does for it: it is done, and what it says is lost or changed."""

    def acknowledge() -> Any:
        sums = dict(checksums())
        if breach == "an acknowledgement is lost":
            raise ConnectionError("nobody knows what the engine holds")
        return sums | {next(iter(sums)): -1}

    return acknowledge


class StateContract(Contract):
    """See the module's head."""

    @pytest.fixture
    def sender(self, module: Any) -> Sender:
        """What broadcasts."""
        return Sender(module)

    @pytest.fixture
    def begun(self, engine: Engine, sender: Sender, tokenizer: Any) -> Generator[RuntimeState[Asleep, Stale, OnDevice, NoOld]]:
        """A state over the engine."""
        with engine_launch(engine, sender, tokenizer) as state:
            yield state

    def said(self, state: RuntimeState[Awake, Fresh, Any, Any], sampling: Sampling = GREEDILY, **named: Any) -> Rollouts:
        """What it says to the prompts."""
        return generate(state, prompts_of(self.prompts), sampling, **named)

    def test_a_broadcast_brings_what_the_actor_has(self, begun: Any, sender: Sender, module: Any, other: Any) -> None:
        """Also into an engine that is awake, where nothing of the old weights is served any more; and the probe hears it."""
        state = refresh(begun)
        assert list(responses(self.said(state)).values()) == self.all_greedy(module)
        _ = generate(state, prompts_of((self.long,)), GREEDILY)
        sender.module = other
        state = broadcast(state)
        assert list(responses(generate(state, prompts_of((self.long,)), GREEDILY)).values()) == [self.greedy(other, self.long)]
        gaps = health(state).gaps
        assert len(gaps) == 2
        assert max(gap.largest for gap in gaps) < 1e-4

    def test_a_broadcast_that_comes_again_is_the_same_as_one(self, engine: Engine, begun: Any) -> None:
        state = broadcast(begun)
        once = engine.checksums()
        state = wake(broadcast(broadcast(state)))
        assert engine.checksums() == once
        first = self.said(state)
        again = self.said(broadcast(state))
        assert responses(again) == responses(first)
        assert torch.equal(again.logprobs, first.logprobs)

    @pytest.mark.parametrize("breach", BREACHES)
    def test_a_broadcast_that_fails_half_way_poisons_and_a_full_one_heals(
        self, engine: Engine, begun: Any, sender: Sender, other: Any, breach: Breach
    ) -> None:
        """The old weights lie there in part, the new ones too: neither are to be served."""
        state, module = refresh(begun), sender.module
        first = self.said(state)
        sender.module = other
        with breached(engine, sender, breach), pytest.raises(EngineFailed, match="recover"):
            _ = broadcast(state)
        for step in (broadcast, self.said, sleep):
            with pytest.raises(EnginePoisoned, match="recover"):
                _ = step(state)
        state = recover(state)
        assert engine.memory().mapped == 0
        sender.module = module
        state = refresh(state)
        healed = self.said(state)
        assert responses(healed) == responses(first)
        assert torch.equal(healed.logprobs, first.logprobs)

    def test_cycles_of_sleep_and_wake_change_nothing(self, engine: Engine, begun: Any) -> None:
        state = refresh(begun)
        first = self.said(state)
        for _ in range(3):
            state = refresh(sleep(state))
            assert torch.equal(self.said(state).logprobs, first.logprobs)
            if engine.keeps is not None:
                state = wake(sleep_keeping(state))
                assert torch.equal(self.said(state).logprobs, first.logprobs)

    def test_a_prompt_has_n_samples(self, begun: Any) -> None:
        """One prompt after the other, which are the same after a night's sleep."""
        state = refresh(begun)
        sampled = self.said(state, SAMPLED)
        assert sampled.groups.tolist() == [prompt for prompt in range(len(self.prompts)) for _ in range(3)]
        assert sampled.samples.tolist() == [0, 1, 2] * len(self.prompts)
        assert len(set(responses(sampled).values())) == len(sampled)
        assert responses(self.said(refresh(sleep(state)), SAMPLED)) == responses(sampled)

    def test_seeds_are_of_run_epoch_prompt_draw_and_sample(self, engine: Engine, sender: Sender, tokenizer: Any, begun: Any) -> None:
        state = refresh(begun)
        whole = responses(self.said(state, SAMPLED))
        same = prompts_of(self.prompts[:1] * 4)
        assert len(set(responses(generate(state, same, SAMPLED)).values())) == 12
        alone = generate(state, prompts_of(self.prompts[2:3], first=2), dc.replace(SAMPLED, samples=2))
        assert responses(alone) == {(2, 0): whole[2, 0], (2, 1): whole[2, 1]}
        others = [self.said(state, SAMPLED, draw=1), generate(state, prompts_of(self.prompts, epoch=1), SAMPLED)]
        with engine_launch(engine, sender, tokenizer, seed=1) as another:
            others.append(self.said(refresh(another), SAMPLED))
        for rollouts in others:
            assert all(tokens != whole[which] for which, tokens in responses(rollouts).items())

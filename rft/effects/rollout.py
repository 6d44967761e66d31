"""Prompts into rollouts: the engines of all ranks share the prompts, and every rank takes back its own."""

import dataclasses as dc
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from rft.effects import first_token
from rft.effects.runtime import Runtime, runtime_of
from rft.effects.sharing import Shared
from rft.engines.protocol import Completion, Request, SeeingEngine
from rft.engines.requests import check_requests
from rft.engines.stopping import StopStrings
from rft.errors import BadInput, TooStale
from rft.experience import Prompts, Rollouts
from rft.images import misfit, unmatched
from rft.parallel.seeds import seed_of
from rft.sampling import Finish, Sampling
from rft.shapes import require_kind
from rft.state import BatchId, PolicyVersion, RuntimeState


def generate(state: RuntimeState[Any, Any, Any, Any], prompts: Prompts, sampling: Sampling, draw: int) -> Rollouts:
    """`sampling.samples` responses for each of this rank's prompts, sampled from the weights that the engine holds."""
    runtime = runtime_of(state)
    version = state.weights.version
    assert version is not None, "an engine that is awake holds weights of some version"
    with runtime.lockstep.agreement() as exchange:
        _require_kinds(prompts, sampling, draw)
        own = _requests(runtime.spec.seed, prompts, sampling, draw)
        _check(runtime, own, sampling)
        exchange.own = _shared_way(sampling), [(prompts.epoch, draw, prompt) for prompt in prompts.ids.tolist()]
    _require_one_way([way for way, _ in exchange.everywhere])
    _require_apart([asked for _, asked in exchange.everywhere])
    shared = Shared(runtime.world, [own[i : i + sampling.samples] for i in range(0, len(own), sampling.samples)], sampling.max_new_tokens)
    with runtime.engine_effect():
        completions = first_token.generate(runtime.engine, shared.requests, sampling, _vocab(runtime))
    stops = StopStrings(runtime.model.tokenizer, sampling.stop)
    completions = [stops.cut(completion) for completion in shared.own(completions)]
    runtime.sampled_after = runtime.of_engine
    return _rollouts(runtime, runtime.lineage.next_batch(state.generation, version), prompts, sampling, completions, version)


def check_lag(state: RuntimeState[Any, Any, Any, Any], max_lag: int) -> None:
    """Raises `TooStale` where the engine's weights are more than `max_lag` versions behind the Actor's."""
    held: Any = state.weights.version
    with runtime_of(state).lockstep.agreement():
        if type(max_lag) is not int or max_lag < 0:
            raise BadInput(f"generate_stale(state, …): max_lag must be at least 0, got {max_lag!r}")
        if held is None or state.version - held > max_lag:
            raise TooStale(
                f"generate_stale(state, …, max_lag={max_lag}): the engine holds version {held}, and the Actor is at {state.version}; "
                "write instead: state = broadcast(state), or allow a larger max_lag"
            )


def _require_kinds(prompts: object, sampling: object, draw: object) -> None:
    """Raises `BadInput` for what is none of what `generate` takes."""
    require_kind("generate(state, prompts, sampling)", "prompts", prompts, Prompts)
    require_kind("generate(state, prompts, sampling)", "sampling", sampling, Sampling)
    if type(draw) is not int:
        raise BadInput(f"generate(state, prompts, sampling, draw=…): draw must be an int, got {draw!r}")


def _requests(run: int, prompts: Prompts, sampling: Sampling, draw: int) -> list[Request]:
    rows = zip(prompts.ids.tolist(), prompts.tokens, prompts.mask, prompts.images or (None,) * len(prompts), strict=True)
    tokens = [(prompt, tuple(row[mask].tolist()), images) for prompt, row, mask, images in rows]
    return [
        Request(tokens=ids, images=images, seed=seed_of(run=run, epoch=prompts.epoch, prompt=prompt, draw=draw, sample=sample))
        for prompt, ids, images in tokens
        for sample in range(sampling.samples)
    ]


def _check(runtime: Runtime, own: Sequence[Request], sampling: Sampling) -> None:
    """Raises `BadInput` for a request that the engine cannot hold."""
    limit = runtime.engine.max_model_len
    for row, request in enumerate(own):
        if not request.tokens or len(request.tokens) + sampling.max_new_tokens > limit:
            raise BadInput(
                f"generate(state, …): prompt {row // sampling.samples} of rank {runtime.world.rank} has {len(request.tokens)} tokens; it "
                f"needs at least 1, and with max_new_tokens={sampling.max_new_tokens} at most the engine's max_model_len={limit}"
            )
        if wrong := _unseen(runtime, request):
            raise BadInput(f"generate(state, …): prompt {row // sampling.samples} of rank {runtime.world.rank}: {wrong}")
    vocab, reader = _vocab(runtime), runtime.model.images
    if vocab is not None:
        placeholder = None if reader is None else reader.placeholder
        check_requests(own, sampling, max_model_len=limit, vocab=vocab, placeholder=placeholder)


def _vocab(runtime: Runtime) -> int | None:
    """Of the model; None for a scripted one, which has no configuration."""
    text_config = getattr(runtime.model.config, "get_text_config", None)
    return None if text_config is None else int(text_config().vocab_size)


def _shared_way(sampling: Sampling) -> dict[str, Any]:
    """What must be the same on all ranks, whose engines share the prompts: how many samples each has is its own rank's matter."""
    return {field.name: getattr(sampling, field.name) for field in dc.fields(sampling) if field.name != "samples"}


def _require_one_way(ways: Sequence[dict[str, Any]]) -> None:
    """Raises `BadInput`, on all ranks, where they sample in different ways."""
    for rank, way in enumerate(ways):
        for name in (name for name, value in way.items() if value != ways[0][name]):
            both = f"Sampling.{name} is {ways[0][name]!r} on rank 0 and {way[name]!r} on rank {rank}"
            raise BadInput(
                f"generate(state, prompts, sampling): {both}; the engines of all ranks share the prompts: give every rank the same"
            )


def _require_apart(everywhere: Sequence[Sequence[tuple[int, int, int]]]) -> None:
    """Raises `BadInput`, on all ranks, where two have the same prompt in the same epoch and draw: it would have the same seeds there."""
    owners = dict[tuple[int, int, int], int]()
    for rank, each in ((rank, each) for rank, asked in enumerate(everywhere) for each in asked):
        other = owners.setdefault(each, rank)
        if other != rank:
            epoch, _, prompt = each
            both = f"ranks {other} and {rank} both have prompt {prompt} of epoch {epoch}, and would sample the same responses"
            own = "give each rank its own part, next_prompts(…, Share(index=rank, count=ranks)), or another draw"
            raise BadInput(f"generate(state, prompts, sampling): {both}; {own}")


def _unseen(runtime: Runtime, request: Request) -> str | None:
    """Why the engine cannot take a request's images, or the want of them."""
    reader, engine = runtime.model.images, runtime.engine
    if request.images is None:
        return None if reader is None else unmatched(request.tokens, reader.placeholder)
    if reader is None:
        return f"it has images, and {runtime.model.path} is a model of text alone; take one that takes images, such as Qwen2.5-VL"
    if not isinstance(engine, SeeingEngine) or not engine.takes_images:
        return f"it has images, and the engine {engine.name} takes none; write LaunchSpec(engine=TransformersEngine(…) or VLLMEngine(…))"
    return misfit(list(request.tokens), request.images, reader.placeholder)


def _rollouts(
    runtime: Runtime,
    batch: BatchId,
    prompts: Prompts,
    sampling: Sampling,
    completions: Sequence[Completion],
    version: PolicyVersion,
) -> Rollouts:
    each = torch.arange(len(prompts)).repeat_interleave(sampling.samples)
    starts = prompts.mask.sum(1)[each]
    lengths = torch.tensor([len(c.tokens) for c in completions], dtype=torch.int64)
    width = int((starts + lengths).max()) if completions else 0
    column = torch.arange(width)[None, :]
    sampled = (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
    mask = column < (starts + lengths)[:, None]
    tokens, logprobs = torch.zeros(len(each), width, dtype=torch.int64), torch.zeros(len(each), width)
    tokens[mask & ~sampled] = prompts.tokens[each][prompts.mask[each]]
    drawn = [np.array(c.tokens, dtype=np.int64) for c in completions]  # transformers looks at every number of a tuple, and at none of these
    tokens[sampled] = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *drawn]))
    logprobs[sampled] = torch.from_numpy(np.fromiter(itertools.chain.from_iterable(c.logprobs for c in completions), np.float32))
    rows, decode = each.tolist(), runtime.model.tokenizer.batch_decode
    return Rollouts(
        batch=batch,
        tokens=tokens,
        mask=mask,
        sampled=sampled,
        logprobs=logprobs,
        versions=torch.where(sampled, version, -1),
        groups=prompts.ids[each],
        samples=torch.arange(sampling.samples).repeat(len(prompts)),
        finish=cast(tuple[Finish, ...], tuple(c.finish for c in completions)),
        questions=tuple(prompts.texts[row] for row in rows),
        # Of no rows transformers makes one text.
        responses=tuple(decode(drawn, skip_special_tokens=True)) if completions else (),
        answers=tuple(prompts.answers[row] for row in rows),
        sampling=sampling,
        version=version,
        images=None if prompts.images is None else tuple(prompts.images[row] for row in rows),
    )

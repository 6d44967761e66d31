"""Prompts into rollouts: a TP group generates together, and every rank takes back its own share."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from rft.effects import first_token
from rft.effects.runtime import Runtime, runtime_of
from rft.engines.protocol import Completion, Request
from rft.engines.requests import check_requests
from rft.engines.stopping import StopStrings
from rft.errors import BadInput, TooStale
from rft.experience import Finish, Prompts, Rollouts, Sampling
from rft.parallel.seeds import seed_of
from rft.state import BatchId, PolicyVersion, RuntimeState


def generate(state: RuntimeState[Any, Any, Any, Any], prompts: Prompts, sampling: Sampling, draw: int) -> Rollouts:
    """`sampling.samples` responses for each of this rank's prompts, sampled from the weights that the engine holds."""
    runtime = runtime_of(state)
    version = state.weights.version
    assert version is not None, "an engine that is awake holds weights of some version"
    with runtime.lockstep.agreement():
        _require_kinds(prompts, sampling, draw)
        own = _requests(runtime.spec.seed, prompts, sampling, draw)
        _check(runtime, own, sampling)
    together = _gathered(runtime, own)
    with runtime.engine_effect():
        completions = first_token.generate(runtime.engine, [request for part in together for request in part], sampling)
    first = sum(map(len, together[: runtime.world.tp_rank]))
    stops = StopStrings(runtime.model.tokenizer, sampling.stop)
    completions = [stops.cut(completion) for completion in completions[first : first + len(own)]]
    runtime.generated, runtime.sampled_after = runtime.generated + 1, runtime.of_engine
    batch = BatchId(f"{runtime.generated}@{state.generation} of {runtime.name}")
    return _rollouts(runtime, batch, prompts, sampling, completions, version)


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
    if not isinstance(prompts, Prompts):
        way = "rft.data.prompts makes them (tokenise, then next_prompts)"
        raise BadInput(f"generate(state, prompts, sampling): prompts must be Prompts, got {type(prompts).__name__}; {way}")
    if not isinstance(sampling, Sampling):
        what = f"{type(sampling).__name__} {sampling!r}"
        raise BadInput(f"generate(state, prompts, sampling): sampling must be a Sampling, got {what}; write Sampling(temperature=…)")
    if type(draw) is not int:
        raise BadInput(f"generate(state, prompts, sampling, draw=…): draw must be an int, got {draw!r}")


def _requests(run: int, prompts: Prompts, sampling: Sampling, draw: int) -> list[Request]:
    rows = zip(prompts.ids.tolist(), prompts.tokens, prompts.mask, strict=True)
    tokens = [(prompt, tuple(row[mask].tolist())) for prompt, row, mask in rows]
    return [
        Request(tokens=ids, seed=seed_of(run=run, epoch=prompts.epoch, prompt=prompt, draw=draw, sample=sample))
        for prompt, ids in tokens
        for sample in range(sampling.samples)
    ]


def _gathered(runtime: Runtime, own: list[Request]) -> list[list[Request]]:
    """The requests of every rank of the TP group, in rank order."""
    if runtime.world.tp_size == 1:
        return [own]
    together: list[list[Request]] = [[] for _ in range(runtime.world.tp_size)]
    dist.all_gather_object(together, own, group=runtime.world.tp)
    return together


def _check(runtime: Runtime, own: Sequence[Request], sampling: Sampling) -> None:
    """Raises `BadInput` for a request that the engine cannot hold."""
    limit = runtime.engine.max_model_len
    for row, request in enumerate(own):
        if not request.tokens or len(request.tokens) + sampling.max_new_tokens > limit:
            raise BadInput(
                f"generate(state, …): prompt {row // sampling.samples} of rank {runtime.world.rank} has {len(request.tokens)} tokens; it "
                f"needs at least 1, and with max_new_tokens={sampling.max_new_tokens} at most the engine's max_model_len={limit}"
            )
    text_config = getattr(runtime.model.config, "get_text_config", None)
    if text_config is not None:
        check_requests(own, sampling, max_model_len=limit, vocab=int(text_config().vocab_size))


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
    tokens[sampled] = torch.tensor([t for c in completions for t in c.tokens], dtype=torch.int64)
    logprobs[sampled] = torch.tensor([p for c in completions for p in c.logprobs], dtype=torch.float32)
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
        responses=tuple(decode([c.tokens for c in completions], skip_special_tokens=True)) if completions else (),
        answers=tuple(prompts.answers[row] for row in rows),
        sampling=sampling,
    )

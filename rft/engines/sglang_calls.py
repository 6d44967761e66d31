"""What the process of SGLang's engine is asked for, by SGLang's own interface. Versions differ in it: what is there is taken."""

import dataclasses as dc
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rft.engines import sglang_sampler, sglang_worker
from rft.engines.sglang_setup import Unfit

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

PATIENCE_S = 20.0
"""For SGLang to be idle, after its last response has come."""
Sampled = tuple[list[int], list[float], str, str | None]
"""Token ids, their log-probs, why the response ended, and the version of the weights that it was computed with."""


def start(settings: Mapping[str, Any]) -> "tuple[Engine, Mapping[str, Any]]":
    """The engine, and what it says of itself. Raises `Unfit` where SGLang is missing, too old, or has no room for the cache."""
    engine_class = _engine_class()
    os.environ[sglang_worker.ADDRESSES] = json.dumps(settings["addresses"])
    engine = engine_class(**settings["options"], nccl_port=settings["port"], port=settings["port"])
    info = engine.get_server_info()
    wanted, got = int(settings["options"]["max_total_tokens"]), int(info["max_total_num_tokens"])
    if got + int(info.get("page_size") or 1) <= wanted:  # it may be cut to whole pages
        raise Unfit("bad", f"there is room for {got} tokens of SGLang's cache, and cache_bytes asks for {wanted}: make it smaller")
    return engine, {"version": str(info["version"]), "pid": os.getpid()}


def generate(
    engine: "Engine", prompts: Sequence[Sequence[int]], parameters: Sequence[Mapping[str, Any]] | Mapping[str, Any]
) -> list[Sampled]:
    """Samples a response to each prompt."""
    outputs = _outputs(engine, prompts, parameters, logprob_start_len=-1)
    return [_sampled(output) for output in outputs]


def score(engine: "Engine", sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """log p of every token but the first; the one token that is sampled behind them is not looked at."""
    outputs = _outputs(engine, sequences, {"max_new_tokens": 1, "temperature": 0.0}, logprob_start_len=0)
    return [[float(at[0]) for at in output["meta_info"]["input_token_logprobs"][1:]] for output in outputs]


def load(engine: "Engine", version: str) -> None:
    """Has every TP rank take new weights from the rank of the job that it is connected with; the engine says `version` from then on."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    begin, end = getattr(engine, "begin_weight_update", None), getattr(engine, "end_weight_update", None)
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[MultiprocessingSerializer.serialize([])] * int(engine.server_args.tp_size),
        load_format=sglang_worker.LOADER,
        flush_cache=False,
        weight_version=version,
    )
    if begin is not None:
        _require(begin())
    try:
        _require(engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_tensor(request, None)))
    finally:
        if end is not None:
            _require(end())


def serve(engine: "Engine") -> None:
    """Has every TP rank answer one message of the rank of the job that it is connected with."""
    engine.collective_rpc(sglang_worker.METHOD)


def release(engine: "Engine", tags: Sequence[str]) -> None:
    """Unmaps memory by tags."""
    _ = engine.release_memory_occupation(list(tags))


def resume(engine: "Engine", tags: Sequence[str]) -> None:
    """Maps memory by tags."""
    _ = engine.resume_memory_occupation(list(tags))


def flush(engine: "Engine") -> bool:
    """Drops the prefix cache, and those of images; gives whether nothing stood against it. A request's last step may need a moment."""
    return bool(engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=PATIENCE_S)).success)


def _engine_class() -> "type[Engine]":
    try:
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.layers.sampler import register_sampler_backend
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise Unfit(
            "missing", f"SGLang is not installed, is too old, or cannot be imported here ({error}): pip install 'sglang>=0.5.17'"
        ) from error
    lacks = [name for name in ("run_scheduler_process_func", "collective_rpc", "resume_memory_occupation") if not hasattr(Engine, name)]
    lacks += [name for name in ("custom_weight_loader", "nccl_port", "cuda_graph_backend_prefill") if name not in _fields(ServerArgs)]
    lacks += [name for name in ("weight_version",) if name not in _fields(UpdateWeightsFromTensorReqInput)]
    if lacks:
        raise Unfit("missing", f"this version of SGLang is too old: it has no {', no '.join(lacks)}; pip install 'sglang>=0.5.17'")
    assert register_sampler_backend
    sglang_sampler.register()

    class OwnWorkers(Engine):
        """Its TP ranks are started by a function of ours; and there is no process for text, since tokens are all that is asked for."""

        run_scheduler_process_func = staticmethod(sglang_worker.run)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *arguments: object, **named: object) -> tuple[list[Any], list[str]]:
            del arguments, named
            return [], []

    return OwnWorkers


def _fields(record: Any) -> set[str]:
    """Of a data class, or of one of msgspec's structs."""
    return {field.name for field in dc.fields(record)} if dc.is_dataclass(record) else set(record.__struct_fields__)


def _outputs(engine: "Engine", prompts: Sequence[Sequence[int]], parameters: Any, *, logprob_start_len: int) -> list[dict[str, Any]]:
    if not prompts:
        return []
    return engine.generate(
        input_ids=[list(prompt) for prompt in prompts],
        sampling_params=parameters,
        return_logprob=True,
        logprob_start_len=logprob_start_len,
    )


def _sampled(output: Mapping[str, Any]) -> Sampled:
    meta = output["meta_info"]
    logprobs = [float(at[0]) for at in meta["output_token_logprobs"]]
    return list(output["output_ids"]), logprobs, str(meta["finish_reason"]["type"]), meta.get("weight_version")


def _require(result: tuple[bool, str]) -> None:
    success, message = result
    if not success:
        raise RuntimeError(message)

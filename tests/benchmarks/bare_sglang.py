"""SGLang without the library, in a process of its own: the same options, its own sampler, loading and sleep. Driven by `Bare`.

python -m tests.benchmarks.bare_sglang OPTIONS      (JSON; commands come by standard input, one line each, answers by standard output)
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rft.engines.sglang_setup import prepare

if __name__ != "tests.benchmarks.bare_sglang":  # in SGLang's process, and in those that it spawns
    prepare()
REPEATS = 5


class Bare:
    """Such a process, as whoever measures sees it."""

    def __init__(self, options: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.bare_sglang", json.dumps(dict(options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "TORCHELASTIC"))} | dict(environment),
            text=True,
        )
        self.ready = self._answer()

    def ask(self, **command: Any) -> Any:
        """Sends a command, and waits for its answer."""
        assert self._process.stdin is not None
        _ = self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        _ = self._process.wait(60)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the bare engine has ended, with the exit code {self._process.wait()}")


def serve(options: Mapping[str, Any]) -> None:
    """Answers until the commands end."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**options)
    _say({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        _say(COMMANDS[command.pop("verb")](engine, **command))
    engine.shutdown()


def generated(engine: Any, prompts: list[list[int]], parameters: dict[str, Any], logprobs: bool) -> dict[str, Any]:
    """Tokens and seconds of one call. The prefix cache is dropped first."""
    engine.flush_cache()
    began = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params=parameters, return_logprob=logprobs)
    count = sum(len(output["output_ids"]) for output in outputs)
    return {"tokens": count, "seconds": time.perf_counter() - began}


def loaded(engine: Any, shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Milliseconds of its own ways to new weights, from fp32 masters: one flattened bucket of all, cast, and a parameter at a time."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    masters = {name: torch.randn(shape, device=device) * 0.02 for name, shape in shapes.items()}
    ways: dict[str, Callable[[], object]] = {
        "own_bucket_ms": lambda: _by_bucket(engine, masters),
        "own_per_parameter_ms": lambda: [_require(engine.update_weights_from_tensor([item], flush_cache=False)) for item in _cast(masters)],
    }
    return {name: _median_ms(lambda way=way: _within_update(engine, way)) for name, way in ways.items()}


def slept(engine: Any) -> dict[str, Any]:
    """Seconds of its own release and resume of everything, and the device memory that it gives back, in MiB."""
    row = dict[str, Any]()
    for _ in range(3):
        awake = _device_mib()
        row["own_release_s"] = _seconds(engine.release_memory_occupation)
        row["own_gives_back_mib"] = round(awake - _device_mib())
        row["own_resume_s"] = _seconds(engine.resume_memory_occupation)
    return row


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {"generate": generated, "load": loaded, "sleep": slept}


def _say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _within_update(engine: Any, way: Callable[[], object]) -> None:
    """Newer versions want to be told where an update begins and ends."""
    for step in ("begin_weight_update", way, "end_weight_update"):
        if callable(step):
            _ = step()
        elif hasattr(engine, step):
            _require(getattr(engine, step)())


def _by_bucket(engine: Any, masters: Mapping[str, torch.Tensor]) -> None:
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=list(_cast(masters)))
    both = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    told = MultiprocessingSerializer.serialize(both, output_str=True)
    _require(engine.update_weights_from_tensor([told], load_format="flattened_bucket", flush_cache=False))


def _cast(masters: Mapping[str, torch.Tensor]) -> Any:
    return ((name, tensor.bfloat16()) for name, tensor in masters.items())


def _require(result: tuple[bool, str]) -> None:
    if not result[0]:
        raise RuntimeError(result[1])


def _median_ms(way: Callable[[], object]) -> float:
    _ = way()
    return round(statistics.median(_seconds(way) for _ in range(REPEATS)) * 1e3, 2)


def _seconds(way: Callable[[], object]) -> float:
    began = time.perf_counter()
    _ = way()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return round(time.perf_counter() - began, 4)


def _device_mib() -> float:
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))

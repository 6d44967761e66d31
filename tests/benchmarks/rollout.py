"""`rft.generate` beside the bare engine, on the same prompts in the same process: tokens per second, interleaved.

    python -m tests.benchmarks.rollout FOLDER-TO-MAKE [SIZE [PROMPTS [SAMPLES [NEW-TOKENS [ENGINE]]]]]

The bare engine is vLLM's own `LLM.generate`: one request a prompt with `n` samples, without seeds, and without text, which a model of
random weights has none of. Beside it stand what makes the difference: log-probs, their form, and a seed for each response. With ENGINE
"sglang" it is SGLang's own `Engine.generate`, in its process (`bare_sglang`), with log-probs and without. Appends medians of five rounds
to results/rollout.jsonl, and of one more call of either where its time went (`where_time_goes`) to results/rollout_profile.jsonl.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.effects.runtime import runtime_of
from rft.models import find_model
from tests.benchmarks.bare_sglang import Bare
from tests.benchmarks.qwen import Size, random_model
from tests.benchmarks.record import append
from tests.benchmarks.rollout_engine import bare_options
from tests.benchmarks.turns import my_turn
from tests.benchmarks.where_time_goes import on_the_device, on_the_host

ROUNDS = 5
PLACES = (on_the_host, on_the_device) if torch.cuda.is_available() else (on_the_host,)


def main(folder: str, size: str = "0.5B", prompts: str = "32", samples: str = "8", new_tokens: str = "256", engine: str = "vllm") -> None:
    """All ways in turn, five times."""
    path = random_model(Path(folder), cast(Size, size))
    rows = int(prompts) * int(samples)
    sampling = rft.Sampling(samples=int(samples), max_new_tokens=int(new_tokens))
    cache = 8 << 30 if torch.cuda.is_available() else 1 << 28
    common: dict[str, Any] = {"max_model_len": 512 + sampling.max_new_tokens, "max_rows": rows, "cache_bytes": cache}
    sglang = rft.SGLangEngine(attention=os.environ.get("RFT_BENCHMARK_ATTENTION"), **common)
    spec = rft.LaunchSpec(
        model=str(path), engine=sglang if engine == "sglang" else rft.VLLMEngine(**common), trainer=rft.FSDP2Trainer(), deadline_s=900
    )
    questions = [Question(id=i, text=f"What is {i} + 7? " * 12, answer="0") for i in range(int(prompts))]
    data = tokenise(questions, find_model(str(path)).tokenizer, max_tokens=512)
    with rft.launch(spec) as state:
        given, _ = next_prompts(data, Cursor(), int(prompts), Share())
        ids = [row[mask].tolist() for row, mask in zip(given.tokens, given.mask, strict=True)]
        runtime = runtime_of(state)
        if engine == "sglang":
            other = Bare(*bare_options(sglang, find_model(str(path)), runtime.world))
            ways = by_sglang(other, ids, sampling)
        else:
            ways = by_vllm(cast(Any, runtime.engine)._llm, ids, sampling)
        state = rft.wake(rft.broadcast(state))
        my_turn(runtime.world)
        ways = {"rft": timed(lambda number: int(rft.generate(state, given, sampling, draw=number).sampled.sum())), **ways}
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name in list(ways) if number % 2 else reversed(ways):  # whoever is next to it, is so from both sides
                rates[name].append(ways[name](number))
        found = {
            f"{name}_{place.__name__}": place(lambda name=name: ways[name](ROUNDS + 1)) for name in ("rft", "bare") for place in PLACES
        }
    row: dict[str, Any] = {"model": size, "engine": engine, "rows": rows, "new_tokens": sampling.max_new_tokens}
    row |= {f"{name}_tokens_per_s": round(statistics.median(each[1:])) for name, each in rates.items()}
    row["rounds"] = {name: [round(rate) for rate in each] for name, each in rates.items()}
    row["rft_of_bare"] = round(statistics.median(a / b for a, b in zip(rates["rft"][1:], rates["bare"][1:], strict=True)), 3)
    print(row)
    append("rollout", row)
    append("rollout_profile", {name: row[name] for name in ("model", "engine", "rows", "new_tokens")} | found)


def by_sglang(other: Bare, ids: list[list[int]], sampling: rft.Sampling) -> dict[str, Callable[[int], float]]:
    """Tokens per second of the bare SGLang's ways, by the number of the round."""
    parameters = {"n": sampling.samples, "max_new_tokens": sampling.max_new_tokens, "stop_token_ids": [257], "ignore_eos": True}

    def way(logprobs: bool) -> float:
        found = other.ask(verb="generate", prompts=ids, parameters=parameters, logprobs=logprobs)
        return found["tokens"] / found["seconds"]

    return {"bare": lambda _: way(True), "bare_without_logprobs": lambda _: way(False)}


def by_vllm(llm: Any, ids: list[list[int]], sampling: rft.Sampling) -> dict[str, Callable[[int], float]]:
    """Tokens per second of the bare vLLM's ways, by the number of the round."""
    asked = [{"prompt_token_ids": prompt} for prompt in ids]
    ways: dict[str, Callable[[int], int]] = {
        "bare": lambda _: bare(llm, asked, sampling, logprobs=0, flat_logprobs=True),
        "bare_dictionaries": lambda _: bare(llm, asked, sampling, logprobs=0),
        "bare_without_logprobs": lambda _: bare(llm, asked, sampling),
        "bare_seeded": lambda number: bare(llm, asked, sampling, logprobs=0, flat_logprobs=True, seed=number),
    }
    return {name: timed(way) for name, way in ways.items()}


def bare(llm: Any, ids: list[dict[str, list[int]]], sampling: rft.Sampling, **options: Any) -> int:
    """Tokens that vLLM sampled."""
    from vllm import SamplingParams

    length = sampling.max_new_tokens
    parameters = SamplingParams(n=sampling.samples, max_tokens=length, stop_token_ids=[257], ignore_eos=True, detokenize=False, **options)
    return sum(len(each.token_ids) for output in llm.generate(ids, parameters, use_tqdm=False) for each in output.outputs)


def timed(way: Callable[[int], int]) -> Callable[[int], float]:
    """Tokens per second of each call."""

    def rate(number: int) -> float:
        began = time.perf_counter()
        return way(number) / (time.perf_counter() - began)

    return rate


if __name__ == "__main__":
    main(*sys.argv[1:])

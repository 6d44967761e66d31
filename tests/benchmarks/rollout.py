"""`rft.generate` beside the bare engine, on the same prompts in the same process: tokens per second, interleaved.

    python -m tests.benchmarks.rollout FOLDER-TO-MAKE [SIZE [PROMPTS [SAMPLES [NEW-TOKENS]]]]

The bare engine is vLLM's own `LLM.generate`: one request a prompt with `n` samples, without seeds, and without text, which a model of
random weights has none of. Beside it stand what makes the difference: log-probs, their form, and a seed for each response. Appends
medians of five rounds to results/rollout.jsonl.
"""

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
from tests.benchmarks.qwen import Size, random_model
from tests.benchmarks.record import append

ROUNDS = 5


def main(folder: str, size: str = "0.5B", prompts: str = "32", samples: str = "8", new_tokens: str = "256") -> None:
    """All ways in turn, five times."""
    path = random_model(Path(folder), cast(Size, size))
    rows = int(prompts) * int(samples)
    sampling = rft.Sampling(samples=int(samples), max_new_tokens=int(new_tokens))
    cache = 8 << 30 if torch.cuda.is_available() else 1 << 28
    engine = rft.VLLMEngine(max_model_len=512 + sampling.max_new_tokens, max_rows=rows, cache_bytes=cache)
    spec = rft.LaunchSpec(model=str(path), engine=engine, trainer=rft.FSDP2Trainer())
    questions = [Question(id=i, text=f"What is {i} + 7? " * 12, answer="0") for i in range(int(prompts))]
    data = tokenise(questions, find_model(str(path)).tokenizer, max_tokens=512)
    with rft.launch(spec) as state:
        given, _ = next_prompts(data, Cursor(), int(prompts), Share())
        state = rft.wake(rft.broadcast(state))
        llm = cast(Any, runtime_of(state).engine)._llm
        ids = [{"prompt_token_ids": row[mask].tolist()} for row, mask in zip(given.tokens, given.mask, strict=True)]
        ways: dict[str, Callable[[int], int]] = {
            "rft": lambda number: int(rft.generate(state, given, sampling, draw=number).sampled.sum()),
            "bare": lambda _: bare(llm, ids, sampling, logprobs=0, flat_logprobs=True),
            "bare_dictionaries": lambda _: bare(llm, ids, sampling, logprobs=0),
            "bare_without_logprobs": lambda _: bare(llm, ids, sampling),
            "bare_seeded": lambda number: bare(llm, ids, sampling, logprobs=0, flat_logprobs=True, seed=number),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS + 1):
            for name, way in ways.items():
                rates[name].append(rate(way, number))
    row: dict[str, Any] = {"model": size, "rows": rows, "new_tokens": sampling.max_new_tokens}
    row |= {f"{name}_tokens_per_s": round(statistics.median(each[1:])) for name, each in rates.items()}
    row["rft_of_bare"] = round(statistics.median(a / b for a, b in zip(rates["rft"][1:], rates["bare"][1:], strict=True)), 3)
    print(row)
    append("rollout", row)


def bare(llm: Any, ids: list[dict[str, list[int]]], sampling: rft.Sampling, **options: Any) -> int:
    """Tokens that vLLM sampled."""
    from vllm import SamplingParams

    length = sampling.max_new_tokens
    parameters = SamplingParams(n=sampling.samples, max_tokens=length, stop_token_ids=[257], ignore_eos=True, detokenize=False, **options)
    return sum(len(each.token_ids) for output in llm.generate(ids, parameters, use_tqdm=False) for each in output.outputs)


def rate(way: Callable[[int], int], number: int) -> float:
    """Tokens per second of one call."""
    began = time.perf_counter()
    return way(number) / (time.perf_counter() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One rank of two: jobs with FSDP2 whose engines are one on each rank (DP 2), or one over both (TP 2), one of whose TP ranks may be killed.

Writes what the test compares, as JSON.
"""

import dataclasses as dc
import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import rft
from rft.data.prompts import Cursor, Share, next_prompts, tokenise
from rft.data.questions import Question
from rft.effects.runtime import runtime_of
from rft.engines.sglang import SGLang
from rft.models import find_model
from rft.parallel.world import open_world
from rft.testing.engines import check_ranks
from tests.engines.sglang.processes import all_gone, family, shared_files

QUESTIONS = tuple(Question(id=i, text=f"{i} and {i}?", answer=str(i)) for i in range(4))
SAMPLING = rft.Sampling(samples=2, max_new_tokens=8, temperature=0.8, top_p=0.9)
ENGINE = rft.SGLangEngine(dtype="float32", max_model_len=256, max_rows=16, cache_bytes=1 << 26, bucket_bytes=1 << 16)


def run(folder: str, tensor_parallel: int, *, killed: bool) -> dict[str, Any]:
    """Samples, trains, samples again; and again over the death of a TP rank."""
    trainer = rft.FSDP2Trainer(dtype="float32", lr=0.02, eps=1e-4)
    spec = rft.LaunchSpec(model=folder, engine=ENGINE, trainer=trainer, tensor_parallel=tensor_parallel, deadline_s=300)
    data = tokenise(QUESTIONS, find_model(folder).tokenizer, max_tokens=64)
    prompts, _ = next_prompts(data, Cursor(), 2, Share(index=int(os.environ["RANK"]), count=2))
    found: dict[str, Any] = {"tokens": {}}
    with rft.launch(spec) as state:
        engine = runtime_of(state).engine
        assert isinstance(engine, SGLang)
        started = family(engine._group.pid) if engine._group.pid else []
        shared = shared_files(started)
        found |= {"shared": len(shared), "left": [str(path) for path in shared if path.exists()]}
        found |= {"path": engine.sync_path, "weights": engine.memory().weights, "cut": sorted(engine.narrows)}
        state = rft.refresh(state)
        first = rft.generate(state, prompts, SAMPLING)
        found["tokens"] |= _by_seed(first)
        state = _learn(rft.sleep(state), first)
        state = rft.refresh(state)
        again = rft.generate(state, prompts, dc.replace(SAMPLING, top_p=1.0))
        found["second"] = _by_seed(again)
        state = rft.compute_old_logprobs(state, again)
        old = state.old.batches[0].values
        found["gap"] = float((old - again.logprobs)[again.sampled].abs().max())
        state = rft.finish_batch(state)
        found["probe"] = max(gap.largest for gap in rft.health(state).gaps if gap.of == "probe")
        if killed:
            found |= _killed(state, engine, prompts)
    found["all_gone"] = all_gone(started)
    return found


def contract(folder: str, tensor_parallel: int) -> dict[str, Any]:
    """Holds to the contract on ranks; gives what this rank's prompts were answered."""
    world, model = open_world(tensor_parallel, timeout_s=120), find_model(folder)
    engine = ENGINE.build(model, world)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    try:
        return {"told": check_ranks(engine, module, model.tokenizer, world)}
    finally:
        engine.close()
        dist.destroy_process_group()


def _killed(state: Any, engine: SGLang, prompts: rft.Prompts) -> dict[str, Any]:
    """The second TP rank is killed while nobody asks for anything; what is told, and what is sampled once the engine has been recovered."""
    told, ended = "", True
    if (pid := engine._group.pid) is not None:
        started = family(pid)
        next(process for process in started if "scheduler_TP1" in " ".join(process.cmdline())).kill()
        ended = all_gone(started)
    try:
        _ = rft.generate(state, prompts, SAMPLING)
    except rft.RftError as error:
        told = f"{type(error).__name__}: {error}"
    state = rft.refresh(rft.recover(state))
    return {"told": told, "ended": ended, "after": _by_seed(rft.generate(state, prompts, dc.replace(SAMPLING, top_p=1.0)))}


def _learn(state: Any, rollouts: rft.Rollouts) -> Any:
    """One step towards even tokens."""
    better = torch.where(rollouts.tokens % 2 == 0, 1.0, -1.0) * rollouts.sampled
    experience = rft.experience(rollouts, torch.zeros(len(rollouts.tokens)), better)
    state = rft.compute_old_logprobs(state, rollouts)
    state, _ = rft.train_step(state, rft.take(experience, torch.arange(len(experience))), rft.grpo())
    return rft.finish_batch(state)


def _by_seed(rollouts: rft.Rollouts) -> dict[str, list[int]]:
    """The responses, by the numbers of prompt and sample."""
    rows = zip(rollouts.groups.tolist(), rollouts.samples.tolist(), rollouts.tokens, rollouts.sampled, strict=True)
    return {f"{prompt}, {sample}": tokens[sampled].tolist() for prompt, sample, tokens, sampled in rows}


def main(out: Path, folder: str, *cases: str) -> None:
    """Each case is the size of the TP group, with `, killed` or `, contract` behind it or nothing."""
    held = {case: contract(folder, int(case[0])) for case in cases if case.endswith("contract")}
    found = held | {case: run(folder, int(case[0]), killed=case.endswith("killed")) for case in cases if case not in held}
    _ = (out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(500, exit=True)  # a rank that hangs says where
    main(Path(sys.argv[1]), *sys.argv[2:])

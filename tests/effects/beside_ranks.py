"""What real ranks do for `test_beside.py`: beside_ranks.py MODELS RESULTS BACKEND. Rank r leaves what it saw in RESULTS/r.pt."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rft
from rft.effects.runtime import runtime_of
from rft.parallel.world import open_world
from rft.spec.lora import LoRA
from tests.trainers.backends import specification
from tests.trainers.batches import random_experience, rows_of
from tests.trainers.judges import SHARES, random_rollouts

MODELS, RESULTS, BACKEND = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
KIND, BRIEF = rft.reward_model("kind"), rft.reward_model("brief")


def specify(**options: Any) -> rft.LaunchSpec:
    trainer = specification(BACKEND, {"dtype": "float32", "lr": 1e-2, "lora": options.pop("lora", None)})
    return rft.LaunchSpec(**{"model": str(MODELS / "actor"), "engine": None, "trainer": trainer, **options})


def refusal(act: Callable[[], object]) -> str:
    try:
        _ = act()
    except rft.RftError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def weights(state: Any) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in runtime_of(state).trainer.stream_weights()}


def mine() -> tuple[int, ...]:
    return SHARES[dist.get_world_size()][dist.get_rank()]


def taught(state: Any) -> Any:
    state, _ = rft.supervised_step(state, rows_of(random_experience(), *mine()))
    return state


def company() -> Any:
    """All frozen roles beside one Actor, for five steps of it."""
    names = ("kind", "brief")[:: -1 if dist.get_rank() else 1]  # which one is named first must not matter
    judges = {name: rft.RewardModel(model=str(MODELS / name), dtype="float32") for name in names}
    spec = specify(reference=rft.Reference(dtype="float32"), ema=rft.MovingAverage(decay=0.9, where="device"), reward_models=judges)
    seen: dict[str, Any] = {"actor": [], "average": []}
    with rft.launch(spec) as state:
        rollouts = random_rollouts(*mine())
        seen["roles"] = [(p.role, p.where, p.bytes > 0) for p in state.roles.placements]
        seen["actor"].append(weights(state))
        for _ in range(5):
            state = rft.update_ema(taught(state))
            seen["actor"].append(weights(state))
        seen["average"] = rft.reference_logprobs(state, rollouts, role=rft.EMA)
        state = rft.offload(state, rft.EMA)
        seen["refused"] = [refusal(lambda: rft.update_ema(state)), refusal(lambda: rft.reference_logprobs(state, rollouts))]
        _ = rft.export(state, RESULTS / "average", role=rft.EMA)
        state, seen["reference"] = rft.use(state, rft.REFERENCE, lambda there: rft.reference_logprobs(there, rollouts))
        state = rft.reload(state, KIND)
        seen["turn"] = refusal(lambda: rft.reload(state, BRIEF))
        seen["kind"] = rft.model_rewards(state, rollouts, KIND).values
        state = rft.offload(state, KIND)
        state, brief = rft.use(state, BRIEF, lambda there: rft.model_rewards(there, rollouts, BRIEF))
        seen["brief"] = (brief.values, brief.valid, [failure.row for failure in brief.failures])
    return seen


def base() -> Any:
    """The Reference of an Actor with LoRA."""
    seen: dict[str, Any] = {}
    with rft.launch(specify(reference=rft.Reference(), lora=LoRA(rank=4))) as state:
        rollouts = random_rollouts(*mine())
        state = taught(taught(state))
        seen["role"] = state.roles.of(rft.REFERENCE)
        seen["reference"] = rft.reference_logprobs(state, rollouts)
        seen["refused"] = [
            refusal(lambda: rft.offload(state, rft.REFERENCE)),
            refusal(lambda: rft.export(state, RESULTS / "no", role=rft.REFERENCE)),
        ]
        state = rft.offload_actor(state)
        seen["refused"].append(refusal(lambda: rft.reference_logprobs(state, rollouts)))
        state = rft.reload_actor(state)
        seen["again"] = rft.reference_logprobs(state, rollouts)
    return seen


def launches() -> Any:
    """What is refused before or while models are built."""
    judge = rft.RewardModel(model=str(MODELS / "kind"), where="device")
    rank = dist.get_rank()
    wider, trained = str(MODELS / f"wider {rank}"), str(MODELS / f"trained {rank}")
    wanted: dict[str, dict[str, Any]] = {
        "two on the device": {"reward_models": {"kind": judge, "brief": judge}},
        "a place of its own": {"reference": rft.Reference(shards=1, where="device"), "lora": LoRA()},
        "another model": {"reference": rft.Reference(model=str(MODELS / "kind"))},
        "other models": {"model": wider},
        "other weights": {"model": trained},
        "other references": {"reference": rft.Reference(model=trained)},
    }
    return {name: refusal(lambda asked=asked: rft.launch(specify(**asked)).__enter__()) for name, asked in wanted.items()}


def main() -> None:
    _ = open_world(1, timeout_s=300)  # one world for all launches: DeepSpeed remembers the groups of the first
    seen = {scene.__name__: scene() for scene in (company, base, launches)}
    torch.save(seen, RESULTS / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

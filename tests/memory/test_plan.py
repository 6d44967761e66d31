import dataclasses as dc
import math
from typing import Any

import pytest

from rft.errors import BadInput
from rft.memory import Plan, Schedule, Setting, plan, steps
from rft.memory.activations import Pass, activations
from rft.memory.plan import CONTEXT, KEPT, KEPT_SHARE
from rft.memory.steps import Work, training
from rft.spec import (
    Critic,
    DeepSpeedTrainer,
    FSDP2Trainer,
    LaunchSpec,
    LoRA,
    MovingAverage,
    Reference,
    RewardModel,
    SGLangEngine,
    SharedCritic,
    TransformersEngine,
    VLLMEngine,
)
from rft.trainers import gathering
from tests.memory.models import BLOCK, OUTSIDE, PARAMETERS, folder, judge, tiny

GIB = 1 << 30
WEIGHTS, MOMENTS = 4 * PARAMETERS, 8 * PARAMETERS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder(tmp_path_factory.mktemp("tiny"))


def setting(model: str, *, engine: Any = None, schedule: Schedule | None = None, **options: Any) -> Setting:
    """Four rows of 32 + 32 tokens; two of them fill a micro-batch."""
    machine = {name: options.pop(name) for name in ("world_size", "minibatches", "host_gib", "ranks_per_host") if name in options}
    launch = LaunchSpec(model=model, engine=engine, **{"trainer": FSDP2Trainer(micro_batch_tokens=128), **options})
    lengths = {"prompts": 2, "samples": 2, "longest_prompt": 32, "longest_response": 32}
    return Setting(launch=launch, device_gib=4.0, schedule=schedule or Schedule(), **lengths, **machine)


def rows(made: Plan, phase: str) -> dict[str, int]:
    """A phase's rows without the context and what the allocator keeps."""
    found = next(each for each in made.phases if each.name == phase)
    return {name: size for name, size in found.rows.items() if name not in ("context", "kept by the allocator")}


def test_a_step_on_one_rank_is_as_summed_up_by_hand(model: str):
    made = plan(setting(model))
    lives = activations(tiny(), Pass(tokens=128, wanted=128, longest=64, dtype="bfloat16"))
    assert [phase.name for phase in made.phases] == ["old log-probs", "train"]
    assert rows(made, "old log-probs") == {
        "actor weights": 1_348_096,
        "optimizer": 2_696_192,
        "gathered weights": 674_048,
        "activations": lives.scoring,
        "experience": 128 * 128,
    }
    # The gradient of the first micro-batch in fp32, whole; a block of it again as it is reduced, and what that gives on one rank.
    assert rows(made, "train") == {
        "actor weights": 1_348_096,
        "optimizer": 2_696_192,
        "gathered weights": 674_048,
        "gradients": 1_348_096 + 2 * 4 * 147_968,
        "activations": lives.training,
        "experience": 128 * 128,
    }
    passing = 674_048 + 1_348_096 + 2 * 4 * 147_968 + lives.training + 128 * 128
    assert made.peak.used == CONTEXT + WEIGHTS + MOMENTS + passing
    assert made.peak.total == made.peak.used + KEPT + int(KEPT_SHARE * passing)
    assert made.peaks() == {phase.name: (phase.used, phase.total) for phase in made.phases}


def test_one_micro_batch_has_no_earlier_gradient(model: str):
    alone = plan(setting(model, trainer=FSDP2Trainer(), minibatches=1))
    assert rows(alone, "train")["gradients"] == 2 * 4 * BLOCK
    halves = plan(setting(model, minibatches=2))
    assert rows(halves, "train")["gradients"] == 2 * 4 * BLOCK


def test_resharded_blocks_leave_one_gathered_and_the_gradient_in_shards(model: str):
    thrifty = FSDP2Trainer(micro_batch_tokens=128, keep_gathered=False)
    one, two = plan(setting(model, trainer=thrifty)), plan(setting(model, trainer=thrifty, world_size=2))
    assert rows(one, "train")["gathered weights"] == 2 * (BLOCK + OUTSIDE)
    assert rows(two, "train")["gathered weights"] == 2 * (3 * BLOCK + OUTSIDE)
    assert rows(two, "train")["gradients"] == 4 * PARAMETERS // 2 + 4 * BLOCK + 2 * BLOCK
    assert rows(two, "train")["actor weights"] == WEIGHTS // 2


@pytest.mark.parametrize(("keep", "computed"), [(True, 4 * OUTSIDE), (False, 0)])
def test_a_step_ends_with_the_reduction_of_what_is_outside_of_the_blocks(keep: bool, computed: int):
    work = Work(tokens=256, wanted=128, longest=64)
    _, end = training(tiny(), FSDP2Trainer(micro_batch_tokens=128, keep_gathered=keep), work, 2)
    assert end["gathered weights"] == 2 * OUTSIDE
    settled = (4 * PARAMETERS - 4 * OUTSIDE) // 2 if keep else 4 * PARAMETERS // 2
    assert end["gradients"] == settled + max(2 * OUTSIDE + computed + 4 * OUTSIDE, 4 * OUTSIDE + 2 * OUTSIDE)


def test_the_engine_is_there_in_its_phases_alone(model: str):
    engine = VLLMEngine(cache_bytes=1 << 20, max_rows=4)
    made = plan(setting(model, engine=engine))
    assert [phase.name for phase in made.phases] == ["broadcast", "generate", "old log-probs", "train"]
    assert rows(made, "generate")["cache"] == 1 << 20
    assert rows(made, "broadcast")["engine weights"] == rows(made, "generate")["engine weights"] == 2 * PARAMETERS
    assert "cache" not in rows(made, "broadcast")
    assert "engine weights" not in rows(made, "train")
    graphs = "CUDA graphs, buffers"
    assert (
        rows(made, "train")[graphs]
        == rows(made, "generate")[graphs]
        > rows(plan(setting(model, engine=VLLMEngine(eager=True))), "train")[graphs]
    )
    two = plan(setting(model, engine=engine, world_size=2))
    assert rows(two, "broadcast")["sync bucket"] == 2 * 2 * PARAMETERS  # in bf16: all of it as it came, beside what is made of that
    assert "sync bucket" not in rows(made, "broadcast")


def test_new_weights_go_to_sglang_through_a_bucket(model: str):
    made = plan(setting(model, engine=SGLangEngine(cache_bytes=1 << 21, bucket_bytes=1 << 10)))
    assert rows(made, "broadcast")["engine weights"] == 2 * PARAMETERS
    assert rows(made, "generate")["cache"] == 1 << 21
    assert rows(made, "broadcast")["sync bucket"] == 2 * 320 * 128  # the embedding, which is the largest tensor
    whole = plan(setting(model, engine=SGLangEngine(bucket_bytes=1 << 30)))
    assert rows(whole, "broadcast")["sync bucket"] == 2 * PARAMETERS
    kept = plan(setting(model, engine=SGLangEngine(), schedule=Schedule(keep_engine_weights=True)))
    assert rows(kept, "train")["engine weights"] == 2 * PARAMETERS


def test_a_gathered_stream_takes_the_bucket_that_came_what_is_made_of_it_and_the_next_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gathering, "BUCKET", 100)
    assert gathering.most([]) == 0
    assert gathering.most([40, 40]) == 2 * 80
    assert gathering.most([40, 40, 40, 150, 10]) == max(2 * 80 + 40, 40 + 150, 150 + 10, 10)
    assert gathering.most([30, 150, 120, 30, 30]) == max(30 + 150, 150 + 120, 120 + 60, 2 * 60)
    monkeypatch.setattr(steps, "BATCH", 50)
    assert steps.streamed([40, 40, 40, 150, 10], 2) == 50 + 200
    assert steps.streamed([40, 40], 2) == 2 * 80  # no more than there is, as it came and as it is made
    assert steps.streamed([40, 40], 1) == 80
    assert steps.streamed([40, 40, 40], 1) == 50 + 40


def test_an_engine_that_wakes_is_compared_with_the_actor_which_is_gathered_for_it(model: str):
    short = TransformersEngine(max_rows=1)  # to have all of the Actor in full takes more than this engine's own work
    made = plan(setting(model, engine=short))
    assert rows(made, "generate")["gathered weights"] == 2 * PARAMETERS
    for alone in (setting(model, engine=short, probe_every=0), setting(model, engine=short, schedule=Schedule(offload_actor=True))):
        assert "gathered weights" not in rows(plan(alone), "generate")


def test_the_embedded_engine_has_its_cache_while_it_generates(model: str):
    made = plan(setting(model, engine=TransformersEngine(max_rows=3)))
    assert rows(made, "generate")["cache"] == 2 * 2 * 3 * 64 * 64 * 2  # layers, keys and values, rows, tokens, width, bf16
    kept = plan(setting(model, engine=TransformersEngine(), schedule=Schedule(keep_engine_weights=True)))
    assert rows(kept, "train")["engine weights"] == 2 * PARAMETERS
    assert kept.host == {}


def test_the_schedule_moves_what_a_phase_does_not_need(model: str):
    away = Schedule(offload_actor=True, offload_optimizer=True, keep_engine_weights=True)
    made = plan(setting(model, engine=VLLMEngine(), schedule=away, reference=Reference(), ranks_per_host=4))
    there = {phase.name: {name for name in ("actor weights", "optimizer") if name in phase.rows} for phase in made.phases}
    assert there == {
        "broadcast": {"actor weights"},
        "generate": set(),
        "old log-probs": {"actor weights"},
        "reference": set(),
        "train": {"actor weights", "optimizer"},
    }
    assert made.host == {
        "actor weights": WEIGHTS,
        "optimizer": MOMENTS,
        "engine weights": 2 * PARAMETERS,
        "reference": 2 * PARAMETERS,
    }
    assert made.pinned == 4 * sum(made.host.values())


def test_roles_are_there_in_their_own_phase_unless_they_stay(model: str):
    made = plan(setting(model, reference=Reference(dtype="float32"), ema=MovingAverage(where="device"), critic=Critic()))
    assert [phase.name for phase in made.phases] == ["old log-probs", "reference", "critic", "train", "ema"]
    assert rows(made, "reference")["reference weights"] == WEIGHTS
    assert rows(made, "reference")["gathered weights"] == 4 * (BLOCK + OUTSIDE)
    assert "reference weights" not in rows(made, "train")
    assert {rows(made, phase.name)["ema weights"] for phase in made.phases} == {WEIGHTS}
    assert rows(made, "critic")["critic weights"] == WEIGHTS + 4 * 128
    assert rows(made, "critic")["critic optimizer"] == 2 * (WEIGHTS + 4 * 128)
    assert made.host == {"reference": WEIGHTS, "critic": 3 * (WEIGHTS + 4 * 128)}


def test_a_head_on_the_actors_states_needs_the_actor(model: str):
    made = plan(setting(model, critic=SharedCritic(), schedule=Schedule(offload_actor=True)))
    assert rows(made, "critic")["critic weights"] == 4 * 128
    assert rows(made, "critic")["actor weights"] == WEIGHTS


def test_as_many_reward_models_are_there_as_may_be(model: str, tmp_path: Any):
    models = {
        "small": RewardModel(model=judge(tmp_path / "small", layers=1)),
        "large": RewardModel(model=judge(tmp_path / "large", layers=3)),
        "other": RewardModel(model=judge(tmp_path / "other")),
    }
    one, two = (plan(setting(model, reward_models=models, reward_models_on_device=count)) for count in (1, 2))
    sizes = {f"reward model {name} weights": 2 * (layers * BLOCK + OUTSIDE) + 4 * 128 for name, layers in (("large", 3), ("other", 2))}
    assert {k: v for k, v in rows(one, "rewards").items() if "reward" in k} == dict([next(iter(sizes.items()))])
    assert {k: v for k, v in rows(two, "rewards").items() if "reward" in k} == sizes
    assert set(one.host) == {"small", "large", "other"}


def test_zero_and_offloaded_masters(model: str):
    made = plan(setting(model, trainer=DeepSpeedTrainer(stage=3, offload_optimizer=True), world_size=2))
    assert rows(made, "train")["actor weights"] == PARAMETERS
    assert "optimizer" not in rows(made, "train")
    assert made.host == {"actor (its backend)": 8 * PARAMETERS}
    for stage in (1, 2):
        assert plan(setting(model, trainer=DeepSpeedTrainer(stage=stage), world_size=2)).peak.name == "train"


def test_what_fits_is_compared_with_card_limit_and_host(model: str):
    made = plan(setting(model))
    assert made.fits
    assert made.device_bytes == 4 * GIB
    tight = setting(model, device_bytes=made.peak.total)
    assert plan(tight).fits
    assert not plan(dc.replace(tight, launch=dc.replace(tight.launch, device_bytes=made.peak.total - 1))).fits
    assert not plan(setting(model, schedule=Schedule(offload_optimizer=True), host_gib=0.001)).fits


def test_a_setting_is_checked(model: str):
    good = setting(model)
    for wrong, said in [
        ({"prompts": 0}, "prompts must be at least 1"),
        ({"device_gib": 0.0}, "above 0"),
        ({"device_gib": math.inf}, "and finite"),
        ({"minibatches": 5}, "cannot be cut into 5"),
        ({"launch": dc.replace(good.launch, tensor_parallel=2)}, "tensor_parallel=2 does not divide world_size=1"),
        (
            {"launch": dc.replace(good.launch, trainer=FSDP2Trainer(offload=True)), "schedule": Schedule(offload_actor=True)},
            r"FSDP2Trainer\(offload=True\) keeps the Actor on the host by itself",
        ),
        (
            {"launch": dc.replace(good.launch, critic=Critic(trainer=FSDP2Trainer(shards=2)))},
            r"LaunchSpec.critic.trainer: shards=2 does not",
        ),
        (
            {"launch": dc.replace(good.launch, reward_models={"kind": RewardModel(model="x", shards=2)})},
            r"reward_models\['kind'\]: shards=2",
        ),
    ]:
        with pytest.raises(BadInput, match=said):
            _ = dc.replace(good, **wrong)


def test_an_engine_or_trainer_of_ones_own_cannot_be_planned(model: str):
    class Own:
        def build(self, model: Any, world: Any) -> Any: ...

    with pytest.raises(BadInput, match="not for Own"):
        _ = plan(setting(model, engine=Own()))
    with pytest.raises(BadInput, match="not for Own"):
        _ = plan(setting(model, trainer=Own()))


def test_an_adapter_has_the_gradient_and_its_reference_is_the_actor(model: str):
    lora = FSDP2Trainer(micro_batch_tokens=128, lora=LoRA(rank=4))
    made = plan(setting(model, trainer=lora, reference=Reference(), engine=TransformersEngine(), schedule=Schedule(offload_actor=True)))
    adapter = 2 * 4 * (256 + 192 + 192 + 256 + 384 + 384 + 384)
    assert rows(made, "train")["actor weights"] == 2 * PARAMETERS + 4 * adapter
    assert rows(made, "train")["optimizer"] == 8 * adapter
    assert rows(made, "train")["gradients"] == 4 * adapter + 2 * 4 * adapter // 2
    assert "reference weights" not in rows(made, "reference")
    assert "actor weights" in rows(made, "reference")
    assert rows(made, "broadcast")["sync bucket"] == 8 * 320 * 128
    assert rows(made, "train")["activations"] < rows(plan(setting(model)), "train")["activations"]

"""The command, its table, and what it says of a file that is wrong."""

from pathlib import Path

import pytest

from rft import cli
from rft.errors import BadInput
from rft.memory.config import read_setting
from rft.spec import DeepSpeedTrainer, FSDP2Trainer, SharedCritic, VLLMEngine
from tests.launching import ROOT
from tests.memory.models import folder, judge

GOOD = """
device_gib = 8.0
prompts = 2
longest_prompt = 32
longest_response = 32

[launch]
model = "MODEL"

[launch.engine]
kind = "vllm"
cache_bytes = 1048576

[launch.trainer]
kind = "fsdp2"
betas = [0.9, 0.95]

[launch.reward_models.judge]
model = "JUDGE"
"""


@pytest.fixture
def written(tmp_path: Path):
    model, scores, two = folder(tmp_path / "model"), judge(tmp_path / "judge"), judge(tmp_path / "two", labels=2)
    policy = judge(tmp_path / "policy", architecture="Qwen2ForCausalLM")

    def write(text: str) -> Path:
        path = tmp_path / "plan.toml"
        for name, of in {"MODEL": model, "JUDGE": scores, "TWO": two, "POLICY": policy}.items():
            text = text.replace(name, of)
        path.write_text(text)
        return path

    return write


def test_a_plan_is_printed_and_whether_it_fits(written, capsys):
    assert cli.main(["plan", str(written(GOOD))]) == 0
    shown = capsys.readouterr().out
    for word in ("broadcast", "generate", "old log-probs", "rewards", "train", "actor weights", "cache", "kept by the allocator", "in all"):
        assert word in shown
    assert "reward model judge weights" in shown
    assert "it fits, with 3." in shown
    assert cli.main(["plan", str(written(GOOD.replace("device_gib = 8.0", "device_gib = 0.5\nhost_gib = 0.0001")))]) == 1
    shown = capsys.readouterr().out
    assert "GiB are missing" in shown
    assert "pinned on the host, in GiB: judge 0.00; the host has 0.00: 0.00 are missing" in shown


def test_the_same_file_says_it_with_other_kinds(written):
    text = GOOD.replace('kind = "fsdp2"', 'kind = "deepspeed"\nstage = 2').replace('kind = "vllm"\ncache_bytes = 1048576', 'kind = "none"')
    made = read_setting(written(text + '\n[launch.critic]\nkind = "shared"\nlr = 1e-3'))
    assert made.launch.engine is None
    assert made.launch.trainer == DeepSpeedTrainer(stage=2, betas=(0.9, 0.95))
    assert made.launch.critic == SharedCritic(lr=1e-3)
    own = read_setting(written(GOOD + '\n[launch.critic]\nkind = "own"\n[launch.critic.trainer]\nkind = "fsdp2"\nlr = 1e-5'))
    assert own.launch.critic.trainer == FSDP2Trainer(lr=1e-5)
    assert own.launch.engine == VLLMEngine(cache_bytes=1 << 20)


WRONG = [
    (("prompts = 2", ""), "prompts: missing (Setting needs it)"),
    (("betas", "beta"), "launch.trainer.beta: there is no such key; there are betas, dtype, eps, "),
    (("prompts = 2", "prompt = 2"), "prompt: there is no such key; there are device_gib, host_gib, launch, longest_prompt"),
    (('"vllm"', '"vlm"'), "launch.engine: kind is 'vlm'; write one of 'vllm', 'sglang', 'transformers', 'none'"),
    (('kind = "fsdp2"', ""), "launch.trainer: kind is missing; write one of 'fsdp2', 'deepspeed'"),
    (('kind = "fsdp2"', 'kind = "fsdp2"\ndtype = "int8"'), "launch.trainer.dtype: input should be 'bfloat16' or 'float32', got 'int8'"),
    (("prompts = 2", "prompts = 0"), "rft plan: Setting.prompts must be at least 1"),
    (('model = "MODEL"\n', 'model = "MODEL"\ntensor_parallel = 0\n'), "rft plan: LaunchSpec.tensor_parallel must be at least 1"),
    (
        ("[launch.engine]", "[launch.critic]\nkind = 'own'\nwhere = 'moon'\n[launch.engine]"),
        "launch.critic.where: input should be 'device'",
    ),
    (('kind = "vllm"', 'kind = "none"'), "launch.engine: kind 'none' goes with no other key; leave out cache_bytes, got"),
    (("prompts = 2", "prompts = 2\nschedule = 3"), "schedule: it must be a table, got 3"),
    (
        ("[launch.reward_models.judge]\nmodel", "[launch.reward_models.judge]\nname"),
        "launch.reward_models.judge.name: there is no such key",
    ),
    (("prompts = 2", "prompts = "), "cannot be read as TOML"),
    (('model = "MODEL"\n\n[launch.engine]', 'model = "MODEL/none"\n\n[launch.engine]'), "neither a folder with a config.json nor"),
]


TOGETHER = GOOD.replace("prompts = 2", "prompts = 2\nworld_size = 6").replace(
    'model = "MODEL"\n\n', 'model = "MODEL"\ntensor_parallel = 2\n\n', 1
)
"""Six ranks in TP groups of two."""
REFUSED = [
    (("world_size = 6", "world_size = 3"), "tensor_parallel=2 does not divide world_size=3"),
    (("world_size = 6", "world_size = 6\nranks_per_host = 3"), "tensor_parallel=2 does not divide ranks_per_host=3"),
    (("world_size = 6", "world_size = 6\nranks_per_host = 0"), "ranks_per_host must be at least 1, got 0"),
    (("tensor_parallel = 2", "tensor_parallel = 3\n"), "tensor_parallel=3 does not divide the model's 4 attention heads"),
    (('kind = "fsdp2"', 'kind = "fsdp2"\nshards = 4'), "LaunchSpec.trainer: shards=4 does not divide the world size 6"),
    (
        ("[launch.reward_models.judge]", "[launch.reference]\nshards = 4\n[launch.reward_models.judge]"),
        "LaunchSpec.reference: shards=4 does not divide the world size 6",
    ),
    (
        ("cache_bytes = 1048576", "cache_bytes = 1048576\nmax_model_len = 2049"),
        "max_model_len=2049 is more than the 2048 tokens that the model's configuration allows",
    ),
    (("cache_bytes = 1048576", "cache_bytes = 524287"), "cache_bytes=524287 has too few blocks for one row of max_model_len=2048"),
    (('"JUDGE"', '"POLICY"'), "policy is a Qwen2ForCausalLM, and must be a …ForSequenceClassification or …ForTokenClassification"),
    (('"JUDGE"', '"TWO"'), "has 2 labels, and must have 1: its score"),
    (
        ("betas = [0.9, 0.95]", "offload = true\n[schedule]\noffload_actor = true"),
        "offload_actor(state) is refused with it; leave one of them out",
    ),
    (('kind = "vllm"\ncache_bytes = 1048576', 'kind = "transformers"'), "so tensor_parallel=2 cannot work"),
    (
        ("cache_bytes = 1048576", "cache_bytes = 1048576\nmax_model_len = 63"),
        "are 64 tokens together, more than the engine's max_model_len=63",
    ),
]
"""What a launch would refuse, too."""


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_what_is_wrong_is_said_by_name(written, capsys, change, said):
    text = GOOD.replace(*change)
    assert text != GOOD
    assert cli.main(["plan", str(written(text))]) == 2
    error = capsys.readouterr().err
    assert said in error


def test_without_that_it_is_planned(written):
    assert cli.main(["plan", str(written(TOGETHER))]) == 0


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_what_a_launch_refuses_is_not_planned(written, capsys, change, said):
    text = TOGETHER.replace(*change)
    assert text != TOGETHER
    assert cli.main(["plan", str(written(text))]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out


def test_the_owner_of_a_key_is_named(written):
    with pytest.raises(BadInput, match=r"launch\.trainer\.keepgathered: there is no such key; there are .*keep_gathered.*, kind"):
        _ = read_setting(written(GOOD.replace("betas = [0.9, 0.95]", "keepgathered = true")))


def test_the_example_is_read():
    made = read_setting(ROOT / "examples" / "plan.toml")
    assert isinstance(made.launch.engine, VLLMEngine)
    assert made.schedule.offload_optimizer

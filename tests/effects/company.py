"""What models beside an Actor must do in a launch, whatever its backend: `seen` is what the ranks of `beside_ranks.py` saw."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rft.state import Placement
from rft.testing.models import tiny_model
from tests.launching import torchrun
from tests.trainers import oracle
from tests.trainers.batches import random_experience
from tests.trainers.judges import SHARES, plain_scores, random_rollouts, tiny_judge

SCRIPT = Path(__file__).with_name("beside_ranks.py")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "actor")
    for rank in range(2):  # of each rank
        tiny_model(folder / f"wider {rank}", heads=4 + 4 * rank)
        tiny_model(folder / f"trained {rank}", seed=rank)
    tiny_judge(folder / "kind")
    tiny_judge(folder / "brief", max_position_embeddings=12)
    return folder


def launched(models: Path, folder: Path, backend: str) -> list[dict[str, Any]]:
    """What both ranks saw."""
    _ = torchrun(SCRIPT, models, folder, backend, timeout=400)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) | {"folder": folder} for rank in range(2)]


def plain(folder: Path, rank: int) -> torch.Tensor:
    """Log-probs of what a rank's rollouts sampled."""
    rollouts, source = random_rollouts(*SHARES[2][rank]), random_experience(temperature=0.7)
    changed = random_rollouts(*range(8)).tokens
    table = oracle.all_logprobs(oracle.plain_model(folder), type(source)(**{**vars(source), "tokens": changed}))
    return table[list(SHARES[2][rank])] * rollouts.sampled


def test_roles_begin_where_they_are_to_lie(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["company"]["roles"] == [
            ("actor_optimizer", "device", True),
            ("reference", "host", True),
            ("ema", "device", True),
            ("reward model brief", "host", True),
            ("reward model kind", "host", True),
        ]


def test_the_average_follows_the_actor(seen: list[dict[str, Any]]) -> None:
    """Against the naive loop over what the Actor was after each of five steps, and in the folder that it was exported to."""
    first, *others = seen[0]["company"]["actor"]
    expected = first
    for new in others:
        expected = {name: 0.9 * old + 0.1 * new[name] for name, old in expected.items()}
    written = dict(oracle.plain_model(seen[0]["folder"] / "average").named_parameters())
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(written[name].detach(), tensor, atol=1e-6, rtol=0)
    assert oracle.distance(others[-1], expected) > 1e-2, "the Actor has gone on"


def test_log_probs_are_those_of_the_role(seen: list[dict[str, Any]], models: Path) -> None:
    for rank, result in enumerate(seen):
        torch.testing.assert_close(result["company"]["reference"], plain(models / "actor", rank), atol=1e-5, rtol=0)
        torch.testing.assert_close(result["company"]["average"], plain(result["folder"] / "average", rank), atol=1e-5, rtol=0)


def test_a_role_on_the_host_is_not_used(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["company"]["refused"] == [
            "RoleError: update_ema(state): EMA is on the host; write instead: state = reload(state, EMA)",
            "RoleError: reference_logprobs(state, rollouts, role=REFERENCE): REFERENCE is on the host; write instead: state = "
            "reload(state, REFERENCE), or `use`",
        ]


def test_reward_models_take_turns(seen: list[dict[str, Any]], models: Path) -> None:
    rollouts = random_rollouts(*range(8))
    scores = plain_scores(models / "kind", [tokens[mask].tolist() for tokens, mask in zip(rollouts.tokens, rollouts.mask, strict=True)])
    for rank, result in enumerate(seen):
        assert "reward_model('kind') is on the device, and reward_models_on_device=1" in result["company"]["turn"]
        torch.testing.assert_close(result["company"]["kind"], scores[list(SHARES[2][rank])], atol=1e-5, rtol=0)


def test_a_row_that_a_reward_model_cannot_read_is_a_named_failure(seen: list[dict[str, Any]]) -> None:
    lengths = random_rollouts(*range(8)).mask.sum(dim=1)
    for rank, result in enumerate(seen):
        values, valid, failures = result["company"]["brief"]
        readable = lengths[list(SHARES[2][rank])] <= 12
        assert valid.tolist() == readable.tolist()
        assert failures == (~readable).nonzero()[:, 0].tolist()
        assert not values[~valid].any()


def test_the_reference_of_lora_is_the_base_and_takes_nothing(seen: list[dict[str, Any]], models: Path) -> None:
    for rank, result in enumerate(seen):
        assert result["base"]["role"] == Placement(result["base"]["role"].role, "device", 0)
        torch.testing.assert_close(result["base"]["reference"], plain(models / "actor", rank), atol=1e-5, rtol=0)
        assert torch.equal(result["base"]["again"], result["base"]["reference"])
        moved, exported, away = result["base"]["refused"]
        assert "it is computed by the Actor and has no memory of its own; move the Actor instead" in moved
        assert "export the Actor" in exported
        assert "REFERENCE is computed by the Actor, which is offloaded" in away


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("two on the device", "BadInput: LaunchSpec.reward_models: kind, brief are to lie on the device, and only 1 may"),
        (
            "a place of its own",
            "BadInput: with LoRA the Reference is the Actor's base model, and is where the Actor is; leave out shards, where",
        ),
        ("another model", "is not of the kind of the Actor"),
        (
            "other models",
            "BadInput: LaunchSpec.model is not the same model on all ranks: hidden_size in config.json is 128 on rank 0 and 256",
        ),
        ("other weights", "BadInput: LaunchSpec.model is not the same model on all ranks: model.safetensors is "),
        ("other references", "BadInput: LaunchSpec.reference.model is not the same model on all ranks: model.safetensors is "),
    ],
)
def test_what_cannot_work_is_refused_at_launch(what: str, says: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert says in rank["launches"][what]

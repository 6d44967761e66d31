import dataclasses as dc
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import rft
from rft import tree
from rft.objectives import MicroBatch
from rft.rewards.scoring import Rewards
from rft.state import BatchLogProbs, Devices, Roles, first_state
from rft.testing import SAMPLING, scripted_launch, scripted_minibatch, scripted_prompts
from tests.refusals import sampled, with_old


def records() -> list[Any]:
    """One of each record that has tensors."""
    with scripted_launch() as begun:
        state, rollouts = with_old(begun)
        minibatch = scripted_minibatch(rollouts)
        experience = rft.experience(rollouts, torch.ones(4), torch.ones(rollouts.tokens.shape))
        rewards = Rewards(values=torch.ones(4), valid=torch.ones(4, dtype=torch.bool), failures=())
        micro = MicroBatch(rows=minibatch, old=minibatch.logprobs)
        return [scripted_prompts(), rollouts, experience, minibatch, rewards, micro, state.old, state.old.batches[0], state]


RECORDS = records()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_leaves_are_tensors_and_a_round_trip_gives_the_same_record(record: Any) -> None:
    leaves, structure = optree.tree_flatten(record, namespace=tree.NAMESPACE)
    assert leaves
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    assert {id(leaf) for leaf in leaves} == {id(tensor) for tensor in tensors_of(record)}
    again = optree.tree_unflatten(structure, leaves)
    assert type(again) is type(record)
    assert optree.tree_structure(again, namespace=tree.NAMESPACE) == structure
    assert all(one is other for one, other in zip(tree.tree_leaves(again), leaves, strict=True))


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor below a record, found without the tree."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for one in value for tensor in tensors_of(one)]
    below = [getattr(value, field.name) for field in dc.fields(value)] if dc.is_dataclass(value) else []
    return [tensor for one in below for tensor in tensors_of(one)]


def test_mapping_keeps_metadata_and_runs_no_checks() -> None:
    rollouts = RECORDS[1]
    shapes = tree.tree_map(lambda tensor: tuple(tensor.shape), rollouts)
    assert shapes.tokens == tuple(rollouts.tokens.shape)
    assert (shapes.batch, shapes.finish, shapes.sampling) == (rollouts.batch, rollouts.finish, rollouts.sampling)
    doubled = tree.tree_map(torch.add, rollouts, rollouts)
    assert torch.equal(doubled.tokens, rollouts.tokens * 2)


def test_trees_of_other_metadata_have_another_structure() -> None:
    rollouts = RECORDS[1]
    with pytest.raises(ValueError, match="Mismatch"):
        _ = tree.tree_map(torch.add, rollouts, dc.replace(rollouts, batch=rft.BatchId("another")))


def test_structures_are_told_apart_and_may_be_keys() -> None:
    def structure(record: Any) -> Any:
        return optree.tree_structure(record, namespace=tree.NAMESPACE)

    prompts, rollouts = RECORDS[0], RECORDS[1]
    assert structure(prompts) != structure(rollouts)
    assert {structure(prompts): 1}[structure(tree.tree_map(torch.clone, prompts))] == 1


def test_records_lie_in_nests() -> None:
    nest = {"a": [RECORDS[0], (RECORDS[6], 3)]}
    assert len(tree.tree_leaves(nest)) == len(tree.tree_leaves(RECORDS[0])) + len(tree.tree_leaves(RECORDS[6])) + 1


def test_old_logprobs_without_values_and_states_without_a_batch_have_no_leaves() -> None:
    first_step = rft.OldLogProbs(
        version=rft.PolicyVersion(0), batches=(BatchLogProbs(batch=rft.BatchId("b"), values=None),), source="first_step"
    )
    assert tree.tree_leaves(first_step) == []
    assert tree.tree_leaves(first_state(Devices(), Roles())) == []


def test_records_are_no_nodes_outside_their_namespace() -> None:
    assert optree.tree_leaves(RECORDS[0]) == [RECORDS[0]]


def test_sampling_is_metadata() -> None:
    with scripted_launch() as begun:
        rollouts = sampled(rft.refresh(begun))
    assert rollouts.sampling == SAMPLING
    assert SAMPLING not in tree.tree_leaves(rollouts)

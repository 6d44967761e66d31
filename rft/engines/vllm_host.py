"""What vLLM does to the process that it shares with a trainer, undone; and its CPU build, made to be written to in place."""

import contextlib
from collections.abc import Generator

import torch


@contextlib.contextmanager
def plain_layouts() -> Generator[bool]:
    """While a model is built: its linear layers keep their weights as they are loaded. Gives whether this build can do so.

    The CPU build packs them for its kernels otherwise, and drops the originals, so that nothing can be written to them any more.
    Decoding is about a fifth slower without (SmolLM2-135M, bf16, one thread); new weights cost a copy, and no packing.
    """
    from vllm.model_executor.layers import utils

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        del remove_weight
        setattr(layer, "cpu_linear", torch.nn.functional.linear)  # noqa: B010 (an attribute of vLLM's, which its forward calls)

    with replaced(utils, "dispatch_cpu_unquantized_gemm", keep) as done:
        yield done


@contextlib.contextmanager
def no_shared_memory() -> Generator[bool]:
    """While an engine is built: its TP group talks through gloo, and not through shared memory.

    vLLM names that memory alike for every job under torchrun: two jobs on one machine would share it, and what a killed job leaves
    behind makes the next one fail. Gives whether this build can do so.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    with replaced(CpuCommunicator, "_all_group_ranks_share_shm_group_name", _never) as done:
        yield done


def _never(communicator: object) -> bool:
    del communicator
    return False


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Generator[bool]:
    """Another value of an attribute of vLLM's, where there is one of that name; gives whether there is."""
    original = getattr(owner, name, None)
    if original is None:
        yield False
        return
    setattr(owner, name, value)
    try:
        yield True
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def world_kept() -> Generator[None]:
    """While an engine is shut down: vLLM would destroy torch's default process group, which it did not make and others still use.

    It forgets its own groups of that world, so that an engine may be built in another one later.
    """
    from vllm.distributed import parallel_state

    def forget() -> None:
        world = getattr(parallel_state, "_WORLD", None)
        if world is not None:
            world.destroy()
        setattr(parallel_state, "_WORLD", None)  # noqa: B010 (private to vLLM)

    with replaced(parallel_state, "destroy_distributed_environment", forget):
        yield


@contextlib.contextmanager
def threads_kept() -> Generator[None]:
    """vLLM's CPU worker replaces `torch.set_num_threads` for the whole process; the trainer shares it."""
    original = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = original

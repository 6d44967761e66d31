"""How vLLM lets its memory go and takes it back: by its sleep levels on CUDA, by pages on a CPU."""

from typing import TYPE_CHECKING, Literal

from rft.engines.pages import give_back_pages
from rft.errors import BadInput

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.worker.gpu_worker import Worker


class CudaMemory:
    """vLLM's sleep mode: level 1 moves the weights to the host, level 2 drops them; both keep every address.

    What level 2 drops includes buffers that are no parameters (rotary caches); vLLM keeps those on the host itself and puts them
    back with the weights. It falls asleep as a whole only, so what is unmapped alone is mapped again first.
    """

    keeps: Literal["device", "host"] = "host"

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm

    def sleep(self, *, keep: bool, weights_mapped: bool, cache_mapped: bool) -> None:
        """Unmaps both."""
        self.rouse(weights_mapped=weights_mapped, cache_mapped=cache_mapped)
        self._llm.sleep(level=1 if keep else 2)

    def rouse(self, *, weights_mapped: bool, cache_mapped: bool) -> None:
        """Maps what is not mapped; vLLM's allocator complains of being closed before that."""
        if not weights_mapped:
            self.wake_weights()
        if not cache_mapped:
            self.wake_cache()

    def wake_weights(self) -> None:
        """Maps the weights."""
        _ = self._llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """Maps the cache."""
        _ = self._llm.wake_up(tags=["kv_cache"])


def require_a_first() -> None:
    """Raises `BadInput` where an engine has been started in this process before, whose pools vLLM keeps for good."""
    from vllm.device_allocator.cumem import CuMemAllocator

    if CuMemAllocator.get_instance().get_current_usage():
        raise BadInput(
            "vLLM was started in this process before, and on CUDA it cannot be started a second time; run each launch with it in a process "
            "of its own"
        )


class HostMemory:
    """The CPU build's weights and cache: their pages go back to the system, their addresses stay.

    Parameters only: nobody sends buffers again.
    """

    keeps: Literal["device", "host"] = "device"

    def __init__(self, worker: "Worker") -> None:
        self._weights = [parameter.data for parameter in worker.get_model().parameters() if parameter.numel()]
        self._cache = list(worker.model_runner.kv_caches)

    def sleep(self, *, keep: bool, weights_mapped: bool, cache_mapped: bool) -> None:
        """Gives the pages back."""
        if cache_mapped:
            give_back_pages(self._cache)
        if weights_mapped and not keep:
            give_back_pages(self._weights)

    def rouse(self, *, weights_mapped: bool, cache_mapped: bool) -> None:
        """Nothing: the addresses stay."""

    def wake_weights(self) -> None:
        """Nothing: the system gives pages when they are written."""

    def wake_cache(self) -> None:
        """Nothing: the system gives pages when they are written."""

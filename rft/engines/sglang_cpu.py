"""SGLang on a CPU by torch's own operators, where its kernels for CPUs are not installed.

SGLang finds it by an entry point of the library, and takes it where `SGLANG_PLATFORM` says so: the SGLang engine does, on a CPU.
"""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class TorchPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without SGLang's kernels."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        del device
        return False

    def empty_cache(self) -> None:
        """Nothing: torch keeps no memory of a CPU's back. SGLang would collect garbage instead, each time that prefixes are dropped."""

    def get_mha_kv_pool_cls(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> Any:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        class Unpaged(TokenToKVPoolAllocator):
            """Pages of one token are no pages."""

            def __init__(self, size: int, page_size: int = 1, **options: Any) -> None:
                assert page_size == 1
                super().__init__(size, **options)

        return Unpaged

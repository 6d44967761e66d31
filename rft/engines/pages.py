"""Memory of a CPU that goes back to the system, and keeps its addresses."""

import ctypes
import mmap
import sys
from collections.abc import Iterable

from torch import Tensor

MADV_DONTNEED = 4


def give_back_pages(tensors: Iterable[Tensor]) -> None:
    """Gives the physical memory behind tensors back to the system; their addresses stay, and read as zeros until written.

    So views of them stay valid, as they do under CUDA's virtual memory. Elsewhere than on Linux they are zeroed and keep their memory.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if sys.platform == "linux" and length > 0:
            _advise(first, length, MADV_DONTNEED)
        else:
            _ = tensor.detach().zero_()


def _advise(first: int, length: int, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice):
        raise OSError(ctypes.get_errno(), "madvise could not give memory back to the system")

"""The allocator of a run's host memory, where tensors live in it.

A training step allocates and frees the same tensors over and over. The C library gives each large one back to the
system at once, and every step then pays for the same pages again: the system clears them, one fault at a time. Kept
instead, they are warm. The peak hardly grows: what a step frees, its successor takes.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3), from glibc's malloc.h
# Larger blocks go back at once: older versions take no higher bound, and the heap would grow by holes of that size.
_LARGEST_KEPT = 32 << 20
_ALL = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, for the rest of this process.

    Returns: whether it does so now. It does not where the C library is another one, and where the user has set the
    allocator up through the environment.
    """
    chosen = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if chosen or mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST_KEPT), (_TRIM_THRESHOLD, _ALL), (_TOP_PAD, _LARGEST_KEPT))
    return all(mallopt(name, value) == 1 for name, value in settings)

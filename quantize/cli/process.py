"""Settings of the process that fit a long run of a model; nothing of the result depends on them."""

from __future__ import annotations

import ctypes
import os

_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of glibc's mallopt
_LARGE = 2 << 20


def settle() -> None:
    """To be called before torch is imported.

    Threads of torch that wait for work sleep, rather than keep the cores from those of the kernels: a tenth of the
    time of a calibration. Large tensors are mapped one by one where glibc allocates, so that their memory goes back
    when they are freed: a sixth of its peak, for a twentieth of the time.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_ARENA_MAX, 1)

"""Work shared by plain threads, for loops that release the GIL.

Numba's own parallel loops compile everything once more, and where no OpenMP or TBB is installed two callers at the same
time end the process. Starting a thread costs about 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def share(work: Callable[[int], None], workers: int) -> None:
    """Run work(0) to work(workers - 1), the first one here and each other in a thread; the first error is raised."""
    if workers <= 1:
        work(0)
        return
    with ThreadPoolExecutor(workers - 1) as pool:
        others = [pool.submit(work, number) for number in range(1, workers)]
        work(0)
        for other in others:
            other.result()

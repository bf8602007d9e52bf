"""The files that a run writes into: opened at their full size, on a disk that can hold them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from quantkit.export.safetensors_file import write_all
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.journal import Work
from quantkit.quantize.plan import Plan, Shard


def no_space(error: OSError, out: Path) -> QuantkitError | None:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    return QuantkitError(
        f"no space left for the output: {os.strerror(error.errno)}",
        file=out,
        hint="make space and run the same command again: finished tensors are kept",
    )


def open_shard(shard: Shard, folder: Path) -> int:
    """A shard at its full size, its header written.

    Its space is not reserved: some file systems fill what is reserved with zeros, a tenth of the time of a fast run.
    A disk that is too small was refused before (`check_disk`); one that others fill shows when tensors are written.
    """
    path = folder / shard.name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(fd, shard.size)
        write_all(fd, shard.header, 0)
    except OSError as e:
        os.close(fd)
        raise no_space(e, path) or QuantkitError(f"cannot write: {e.strerror}", file=path) from e
    return fd


def check_disk(plan: Plan, work: Work, at_once: int | None) -> None:
    """Refuse to start when the disk cannot hold what is still missing: all, or the `at_once` shards that lie there."""
    needed = plan.file_bytes
    if at_once is not None:
        needed = min(needed, at_once * max(s.size for s in plan.shards))
    have = sum(s.stat().st_blocks * 512 for s in work.checkpoint.iterdir() if s.is_file())
    need = needed - have
    free = shutil.disk_usage(work.folder).free
    if need > free:
        raise QuantkitError(
            "the disk cannot hold the output",
            file=work.folder,
            value=f"{free / 1e9:.2f} GB free",
            allowed=f"{need / 1e9:.2f} GB still needed of {needed / 1e9:.2f} GB",
            hint="make space and run the same command again, or choose another -o",
        )

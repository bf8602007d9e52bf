"""Numba twins of the kernels.

Numba keeps compiled code on disk but looks only at the one source file of a function, not at the helpers inlined into
it: after an upgrade it could run old code. The cache therefore lives in a folder named by the content of all kernels.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from numba import config


def _cache_folder() -> Path:
    """Folder of the compiled kernels of just these sources, in the user's cache."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "quantkit" / f"kernels-{digest.hexdigest()[:16]}"


_FOLDER = _cache_folder()
# True on the first run after an installation: everything is compiled, which takes up to half a minute.
FIRST_RUN = not _FOLDER.exists()
if not os.environ.get("NUMBA_CACHE_DIR"):
    config.CACHE_DIR = str(_FOLDER)  # type: ignore[attr-defined]

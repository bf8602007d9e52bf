"""Where there is no GPU, the Triton kernels are interpreted on the CPU.

Triton looks at this variable when it is imported, which other libraries do as well: it has to be set before any test.
"""

import os
from importlib.metadata import version
from pathlib import Path

if not Path("/proc/driver/nvidia/version").exists() or version("torch").endswith("+cpu"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

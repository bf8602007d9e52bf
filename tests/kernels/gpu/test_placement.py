"""What is said where Triton or a GPU is missing, each in a process of its own."""

import os
import subprocess
import sys

MISSING = """
import sys
sys.modules["triton"] = None
import quantkit.kernels.gpu
"""

ON_THE_CPU = """
import torch
from quantkit.kernels.gpu.tags import check_tags
tags = torch.zeros(1, 1, dtype=torch.int64)
check_tags(tags, tags.int(), tags[0])
"""


def error_of(code):
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    return ran.stderr.partition("QuantkitError: ")[2]


def test_a_missing_triton_is_named_with_its_extra():
    error = error_of(MISSING)
    assert error.startswith("kernels for a GPU need Triton")
    assert "quantkit[gpu]" in error


def test_tensors_on_the_cpu_are_refused_unless_interpreted():
    error = error_of(ON_THE_CPU)
    assert error.startswith("no kernel can read this tensor")
    assert "cpu" in error

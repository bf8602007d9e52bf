"""Triton twins of the kernels, for a GPU; nothing imports them before a tensor lies on one.

Triton comes with torch's CUDA builds and is in the extra `gpu`. Under its interpreter (TRITON_INTERPRET=1 before the
first import) the same functions run on the CPU, slowly: that is how they are tested where there is no GPU.
"""

from importlib.util import find_spec

from quantkit.kernels.errors import QuantkitError

if find_spec("triton") is None:
    raise QuantkitError("kernels for a GPU need Triton", hint="pip install 'quantkit[gpu]'")

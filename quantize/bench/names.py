"""Names of what `quantkit bench kernels` can time: schemes of the packed GEMM, cache formats of the attention."""

from __future__ import annotations

from quantkit.kernels.scheme import SCHEMES

A4 = "nvfp4-a4"  # NVFP4 weights, activations quantised in the kernel

GEMM = (*(n for n in SCHEMES if n != "bf16"), A4)
GROUPED = ("kv-bf16", "kv-f16", "kv-e4m3", "kv-e5m2", "kv-nvfp4", "kv-mxfp4")
LATENT = ("mla-bf16", "mla-e4m3", "mla-dsa")
KNOWN = (*GEMM, *GROUPED, *LATENT)

DEFAULT = (
    *("int4-g128", "int4-g32", "int4a-g128", "nvfp4", A4, "mxfp4", "fp8-block", "fp8-channel"),
    *("kv-bf16", "kv-e4m3", "kv-e5m2", "kv-nvfp4"),
    *LATENT,
)

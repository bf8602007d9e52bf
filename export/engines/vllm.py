"""vLLM 0.33: its tables, and what only it refuses or reads differently."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.export.engines.finding import Finding
from quantkit.export.engines.matching import inside_or_glob, whole
from quantkit.export.engines.rules import Rules
from quantkit.export.engines.subject import Subject
from quantkit.export.targets import FUSED

RULES = Rules(
    name="vllm",
    version="0.33.0",
    fused={n: s for n, s in FUSED.items() if n != "fused_qkv_a_proj_with_mqa"},
    methods=dict.fromkeys(("compressed-tensors", "modelopt", "fp8", "gptq", "awq", "mxfp4"), ""),
    algorithms=frozenset({
        "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION",
    }),
    order=("name", "fused", "class"),
    ignored=whole,
    excluded=inside_or_glob,
    skipped=whole,
    unmatched_refused=False,
    head_is_linear=False,
    experts_by_one=frozenset({"fp8", "modelopt"}),
    drafts=True,
    sees_int4=True,
    unknown_name="refused",
    renamed=((".block_sparse_moe.", ".mlp."),),
)  # fmt: skip


def findings(subject: Subject) -> Iterator[Finding]:
    """Rules that are vLLM's own."""
    quant = subject.quant
    if subject.method == "gptq":
        if quant.get("sym", True) is False:
            yield Finding(
                "refused", "quantization_config", "GPTQ with zero points (sym false)", "symmetric GPTQ, or AWQ"
            )
        if quant.get("desc_act") and quant.get("group_size") != -1:
            yield Finding("refused", "quantization_config", "GPTQ in the order of activations (desc_act)",
                          "desc_act false")  # fmt: skip


def flags(subject: Subject) -> list[str]:
    """Of `vllm serve`."""
    return [f"--tensor-parallel-size {subject.tp}"] if subject.tp > 1 else []

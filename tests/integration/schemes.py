"""The checkpoints that the integration tests write: every output format for every model family.

One entry of FORMATS is a recipe, shipped or written here, and the options of the command. The tiny models are too small for
groups of 128, and have sizes that every format divides: heads of 64, so that the key projection is a whole 128-row block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from families import FAMILIES, read_config, write_config

LINEAR = "[attention, dense_mlp, shared_experts, routed_experts]"


def recipe(*rules: str, format: str) -> str:
    """A recipe of `rules`, the rest kept, in one output format."""
    rest = '  - {match: {role: "*"}, keep: true}'
    return "\n".join(["weights:", *rules, rest, f"outputs: [{{format: {format}}}]", ""])


def every(scheme: str, *, format: str = "compressed-tensors", more: str = "") -> str:
    """A recipe that quantises every linear layer but kv_b to one scheme."""
    return recipe(f"  - {{match: {{role: {LINEAR}, except: [attention.kv_b]}}, scheme: {scheme}{more}}}", format=format)


def mixed(role: str) -> str:
    """Attention in FP8, the layers of `role` in INT4, the rest kept."""
    return recipe(
        "  - {match: {role: attention, except: [attention.kv_b]}, scheme: fp8-channel}",
        f"  - {{match: {{role: {role}}}, scheme: int4-g32}}",
        format="compressed-tensors",
    )


# name: (recipe, shipped by that name or in full; options)
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "int4": ("int4", ("--group", "64")),
    "int4a": (every("int4a-g64"), ()),
    "int4-channel": (every("int4-channel"), ()),
    "nvfp4": ("nvfp4", ()),
    "mxfp4": (every("mxfp4"), ()),
    "fp8-channel": ("fp8-channel", ()),
    "fp8-tensor": (every("fp8-tensor"), ()),
    "fp8-block": ("fp8-block", ("--format", "compressed-tensors")),
    "mixed": (mixed("dense_mlp"), ()),
    "fp8": ("fp8-block", ()),
    "modelopt-nvfp4": ("nvfp4", ("--format", "modelopt")),
    "modelopt-fp8": (every("fp8-tensor", format="modelopt", more=", input_scale: 0.5"), ()),
    "modelopt-fp8-channel": ("fp8-channel", ("--format", "modelopt")),
    "modelopt-fp8-block": ("fp8-block", ("--format", "modelopt")),
}
EXPERT_FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "int4-experts": ("int4-experts", ("--group", "32")),
    "nvfp4-experts": ("nvfp4-experts", ()),
    "mxfp4-experts": ("mxfp4-experts", ()),
    "modelopt-nvfp4-experts": ("nvfp4-experts", ("--format", "modelopt")),
    "gptoss-mxfp4": ("mxfp4-experts", ("--format", "mxfp4")),
    "int4-mtp": (every("int4-g64").replace("role: [", "role: [mtp.routed_experts, "), ()),
    "mixed": (mixed("routed_experts"), ()),
}
DENSE = ("llama", "llama_tied", "qwen2", "qwen3", "gemma2", "phi3")
LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")  # their head sizes divide as they are
MOE = ("qwen2_moe", "qwen3_moe", "mixtral", "minimax_m2", "glm4_moe", *LATENT, "kimi")


def _kimi(folder: Path) -> Path:
    """Kimi with the configuration of the vision tower that the tiny model has."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "pos_emb_height": 8, "pos_emb_width": 8}
    FAMILIES["kimi"](folder)
    vision = sizes | {"num_attention_heads": 4, "num_hidden_layers": 1}
    write_config(folder, read_config(folder) | {"vision_config": vision})
    return folder


SOURCES: dict[str, Callable[[Path], Path]] = {
    **{name: partial(FAMILIES[name], head_dim=64) for name in (*DENSE, *MOE) if name not in (*LATENT, "kimi")},
    **{name: FAMILIES[name] for name in (*LATENT, "gpt_oss")},
    "deepseek_v3": partial(FAMILIES["deepseek_v3"], kv_lora_rank=512),  # the one size that vLLM's CPU attention has
    "kimi": _kimi,
}
# keys of the published config.json that transformers does not write
SOURCES["minimax_m2"] = partial(SOURCES["minimax_m2"], rotary_dim=32, scoring_func="sigmoid", use_routing_bias=True)

# vLLM's ModelOpt method for experts in FP8 knows one scale a tensor only, its CPU method for INT4 experts groups only;
# gpt-oss has a format of its own
_ELSEWHERE = ("int4-channel", "modelopt-fp8-channel", "modelopt-fp8-block", "gptoss-mxfp4", "int4-mtp")

CASES = [
    *((family, name) for family in DENSE for name in FORMATS),
    *((family, name) for family in MOE for name in {**FORMATS, **EXPERT_FORMATS} if name not in _ELSEWHERE),
    ("gpt_oss", "gptoss-mxfp4"),
]

# activations under scales that `quantkit calibrate` measures: (recipe, options of the export)
STATIC_FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "nvfp4-a4": ("nvfp4-a4", ()),
    "modelopt-nvfp4-a4": ("nvfp4-a4", ("--format", "modelopt")),
    "fp8-static": (every("fp8-tensor", more=", input_scale: amax"), ()),
    "modelopt-fp8-static": (every("fp8-tensor", more=", input_scale: amax", format="modelopt"), ()),
}
STATIC_CASES = [(family, name) for family in ("llama", "qwen3_moe") for name in STATIC_FORMATS]

DRAFT_CASES = [
    (family, name)
    for family in ("glm4_moe", "deepseek_v32", "glm_moe_dsa")
    for name in ("int4", "int4-mtp", "nvfp4-experts", "mixed", "fp8", "modelopt-nvfp4", "modelopt-nvfp4-experts")
]


def options(folder: Path, family: str, name: str) -> tuple[str, ...]:
    """The options of `quantkit quantize` for one case; a recipe of this file is written into `folder`."""
    chosen, more = EXPERT_FORMATS[name] if family not in DENSE and name in EXPERT_FORMATS else FORMATS[name]
    return ("-r", named(folder, name, chosen), *more)


def named(folder: Path, name: str, chosen: str) -> str:
    """What `-r` takes: a shipped recipe's name, or the path of one that is written here in full."""
    if "\n" not in chosen:
        return chosen
    path = folder / f"{name}.yaml"
    path.write_text(chosen)
    return str(path)

"""Which kernel runs a layer on each generation of GPUs, and whether its groups and blocks can be cut over the ranks.

Every rank holds a share of w_OI: outputs are cut for `column` layers, inputs for `row` layers (o_proj, down_proj). A
scale group, block or packed word that straddles two shares cannot be loaded. Sources: the kernel selections of vLLM
0.33 and SGLang 0.5.23; nothing here was timed.
"""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.export.engines.finding import Finding
from quantkit.export.engines.modules import Module
from quantkit.export.engines.schemes import Stated
from quantkit.export.engines.subject import Kind, Subject
from quantkit.kernels.scheme import BLOCK

_MARLIN = (0, 32, 64, 128)


def cut_fault(
    split: str, rows: int, inputs: int, *, ranks: int, holders: int, unit: int, unit_name: str, block: bool,
    joined: bool,
) -> str:  # fmt: skip
    """Why a weight w_OI [rows, inputs] cannot be cut over `ranks` ranks, or an empty string.

    holders  ranks that the outputs are cut over: fewer than `ranks` where KV heads are held by several
    unit     the shortest run of inputs that can be cut off: a group, a block or a packed word, as `unit_name` says
    block    scales span 128 outputs as well
    joined   an engine joins it with layers that come behind: a partial last block would shift those
    """
    if split == "row":
        # a partial last block of inputs stays where it is when nothing is cut
        if inputs % ranks or (inputs // ranks % unit and (ranks > 1 or not block)):
            return f"{inputs} inputs / {ranks} is not a multiple of the {unit_name} {unit}"
    elif split == "column":
        if rows % holders:
            return f"{rows} outputs do not divide by {ranks}"
        if block and rows // holders % BLOCK and (ranks > 1 or joined):
            return f"{rows} outputs / {holders} is not a multiple of the block {BLOCK}"
    elif block and rows % BLOCK and joined:
        return f"{rows} outputs are not a multiple of the block {BLOCK}"
    return ""


def _unit(scheme: Stated) -> tuple[int, str]:
    """The shortest run of inputs that can be cut off, and what it is."""
    if scheme.kind == "int4":
        return (scheme.group, "group") if scheme.group else (8, "packed word")
    units = {"nvfp4": (16, "group"), "mxfp4": (32, "group"), "mxfp8": (32, "group"), "fp8-block": (BLOCK, "block")}
    return units.get(scheme.kind, (1, "input"))


def _holders(subject: Subject, module: Module) -> int:
    """Ranks that share the outputs of a layer."""
    text = subject.files.text
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads") or 0
    many = module.leaf in ("k_proj", "v_proj") and heads and subject.tp > heads
    return int(heads) if many else subject.tp


def shares(subject: Subject, kind: Kind) -> tuple[int, int]:
    """(outputs, inputs) of the engine's layer that one rank holds; rounded down where it does not divide."""
    module = kind.example
    members = kind.layer.shards if kind.layer.fused else (module,)
    if module.split == "row":
        return module.rows, module.inputs // subject.tp
    rows = [m.rows // _holders(subject, m) if m.split == "column" else m.rows for m in members]
    return sum(rows), module.inputs


def check_cuts(subject: Subject) -> Iterator[Finding]:
    """Heads, groups and blocks that do not divide at this tensor-parallel size."""
    text, tp = subject.files.text, subject.tp
    heads = text.get("num_attention_heads") or 0
    kv_heads = 0 if text.get("kv_lora_rank") else text.get("num_key_value_heads") or heads
    if heads % tp:
        yield Finding("refused", "config.json", f"{heads} attention heads do not divide by {tp}", "another --tp")
    elif kv_heads and kv_heads % tp and tp % kv_heads:
        yield Finding("refused", "config.json", f"{kv_heads} KV heads and {tp} ranks do not divide", "another --tp")
    for kind in subject.kinds:
        module, scheme = kind.example, kind.scheme
        if scheme is None or module.stored == "plain":
            continue
        unit, unit_name = _unit(scheme)
        # the last shard of a fused layer may end in a part of a block: nothing comes behind it
        joined = kind.layer.fused and kind.layer.shards[-1].leaf != module.leaf
        why = cut_fault(
            module.split, module.rows, module.inputs, ranks=tp, holders=_holders(subject, module), unit=unit,
            unit_name=unit_name, block=scheme.kind == "fp8-block", joined=joined,
        )  # fmt: skip
        if why:
            overlap = "outputs" in why and _overlaps(subject, kind)
            what = f"{module.leaf}: {why}" + (": rows of scales overlap" if overlap else "")
            fix = "another --tp, a smaller group, or keep these layers"
            yield Finding("silently wrong" if overlap else "refused", module.name, what, fix, kind.count)


def _overlaps(subject: Subject, kind: Kind) -> bool:
    """VLLM's method fp8 checks no shards: each gets whole rows of scales, and it is only noticed when they run out."""
    if subject.method != "fp8" or subject.rules.name != "vllm" or not kind.layer.fused:
        return False
    sizes = [m.rows // _holders(subject, m) for m in kind.layer.shards]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    rows = -(-sum(sizes) // BLOCK)
    return all(-(-at // BLOCK) - (-n // BLOCK) <= rows for at, n in zip(starts, sizes, strict=True))


def check_kernels(subject: Subject) -> Iterator[Finding]:
    """The kernel of each kind of layer, and where it is a slow one."""
    for kind in subject.kinds:
        if kind.scheme is None or kind.example.stored == "plain":
            continue
        slow = _slow(subject, kind, kind.scheme)
        title = f"{kind.scheme.title}{' experts' if kind.layer.kind == 'experts' else ''}"
        if slow:
            yield Finding("slow", kind.example.name, f"{title}: {slow[0]}", slow[1], kind.count)
        else:
            yield Finding("ok", kind.example.name, f"{title}: {_kernel(subject, kind, kind.scheme)}", "", kind.count)


def _kernel(subject: Subject, kind: Kind, scheme: Stated) -> str:
    engine, experts = subject.rules.name, kind.layer.kind == "experts"
    if engine in ("transformers", "trtllm"):
        return "decoded to the model's dtype at load" if engine == "transformers" else "TensorRT-LLM's own kernel"
    if scheme.kind == "int4":
        machete = engine == "vllm" and not experts
        return "Machete on SM90, Marlin elsewhere" if machete else "Marlin"
    if scheme.kind in ("nvfp4", "mxfp4"):
        return "CUTLASS or FlashInfer on SM100 and later" if scheme.inputs != "none" else "Marlin"
    return "FP8 on SM89 and later, Marlin before"


def _slow(subject: Subject, kind: Kind, scheme: Stated) -> tuple[str, str] | None:
    """(what is slow, what to do), or None."""
    rows, inputs = shares(subject, kind)
    engine, experts = subject.rules.name, kind.layer.kind == "experts"
    inner = inputs if experts and kind.example.split == "row" else 0  # an expert's inner size is cut
    machete = engine == "vllm" and not experts and scheme.kind == "int4"
    size = f"{rows} x {inputs} on a rank is off"
    table = {
        f"{inner} inputs of an expert on a rank are off Marlin's tiles of 64": (
            scheme.kind == "int4" and inner % max(64, scheme.group or 64), "a smaller --tp, or expert parallelism",
        ),
        f"no Machete kernel for group {scheme.group}: Marlin on Hopper (SM90) too": (
            machete and scheme.group not in (0, 64, 128), "groups of 128 or 64",
        ),
        f"{size} Machete's tiles of 128 x 64: Marlin on Hopper (SM90) too": (
            machete and (inputs % 64 or rows % 128), "",
        ),
        f"{size} Marlin's tiles of 64 x 128: the slow AWQ kernel": (
            subject.method == "awq" and engine == "sglang" and (rows % 64 or inputs % BLOCK), "a smaller --tp",
        ),
        "activations in NVFP4 need SM100 (Blackwell): W4A16 by Marlin before": (
            scheme.kind == "nvfp4" and scheme.inputs != "none", "fine on Blackwell",
        ),
        f"{inner} inputs of an expert on a rank are off CUTLASS' tiles of {BLOCK}": (
            scheme.kind == "nvfp4" and engine == "sglang" and inner % BLOCK, "a smaller --tp",
        ),
        f"{size} DeepGEMM's tiles of 64 x 128: another kernel": (
            scheme.kind == "fp8-block" and (rows % 64 or inputs % BLOCK), "",
        ),
    }  # fmt: skip
    found = ((what, fix) for what, (slow, fix) in table.items() if slow)
    return next(found, None) if engine in ("vllm", "sglang") else None

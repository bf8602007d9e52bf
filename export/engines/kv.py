"""Do the scales of the KV cache reach attention: the configuration switches the cache, names load, values are sound.

Meaning everywhere: float32, one number, a multiplier: stored = e4m3(x / scale), scale = amax / 448. An engine that
finds no scale runs an FP8 cache at 1.0. `kv_scales.py` says which names are written, the table here which ones load.

    engine   class or method             what follows the attention module
    vllm     all                         k_scale, k_proj.k_scale, attn.k_scale, qkv_proj.k_scale, kv_scale
             method fp8                  k_proj.output_scale as well
             latent attention (MLA)      none
    sglang   maps names                  k_scale, k_proj.k_scale, kv_scale, k_proj.output_scale (mixer: k_proj.k_scale)
             takes its own names         attn.k_scale
             builds attention without    none
             latent attention (MLA)      k_proj.k_scale, attn_mqa.k_scale; right with 1.0 alone
    trtllm                               k_proj.k_scale
    transformers  compressed-tensors     k_scale
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantkit.export.engines.finding import Finding
from quantkit.export.engines.subject import Subject
from quantkit.export.kv_scales import FORMATS, attention_kind, sglang_class

_SCALE = re.compile(
    r"(?P<module>.*\.(?:layers|blocks|h)\.\d+\.\w+)\.(?P<name>(?:[kqv]_proj|attn|qkv_proj|qkqkv_proj|attn_mqa|[kv]_cache|q)\."
    r"(?:[kqv]_scale|output_scale|scale)|[kqv]_scale|kv_scale|prob_scale)"
)
_LARGEST = 16.0  # a scale above stands for keys beyond 7168: taken for 448/amax or amax

_PROJ, _SHORT, _NATIVE = "{0}_proj.{0}_scale", "{0}_scale", "attn.{0}_scale"
_VLLM = (_PROJ, _SHORT, _NATIVE, "qkv_proj.{0}_scale", "qkqkv_proj.{0}_scale", "kv_scale", "{0}_cache.scale")
_SGLANG = (_PROJ, _SHORT, "kv_scale", "{0}_proj.output_scale")


@dataclass(frozen=True, slots=True)
class _Names:
    """Forms that load; `why` says why none does."""

    forms: tuple[str, ...]
    why: str = ""

    def of(self, letter: str) -> set[str]:
        return {f.format(letter) for f in self.forms}


def _loading(subject: Subject) -> _Names:
    """What loads, by the table."""
    engine, latent = subject.rules.name, attention_kind(subject.files.text) != "heads"
    if subject.method not in FORMATS or (engine == "transformers" and subject.method != "compressed-tensors"):
        return _Names((), f"{subject.method or 'an unquantised checkpoint'} gives attention no place for KV scales")
    if engine == "vllm":
        more = ("{0}_proj.output_scale",) if subject.method == "fp8" else ()
        why = "every name is mapped to a parameter that latent attention (MLA) lacks"
        return _Names((), why) if latent else _Names((*_VLLM, *more))
    if engine == "sglang" and not latent:
        kind = sglang_class(subject.model_type)
        forms = {"without": (), "native": (_NATIVE,)}.get(kind, _SGLANG)
        why = "" if forms else f"the class of {subject.model_type} builds attention without a place for them"
        return _Names(forms, why)
    return _Names({"sglang": (_PROJ, "attn_mqa.{0}_scale"), "trtllm": (_PROJ,)}.get(engine, (_SHORT,)))


def cache_is_fp8(subject: Subject) -> bool:
    """Does the configuration alone switch the FP8 cache on (`--kv-cache-dtype auto`)?"""
    quant = subject.quant
    scheme = quant.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return str(quant.get("kv_cache_quant_algo") or "").upper() == "FP8"
    if scheme.get("num_bits") != 8 or scheme.get("type") != "float":
        return False
    if subject.rules.name == "sglang":
        usual = scheme.get("strategy", "tensor") == "tensor" and scheme.get("symmetric") is not False
        return usual and scheme.get("dynamic") is not True
    return subject.method != "modelopt" or scheme.get("dynamic") is False


def check_cache(subject: Subject) -> Iterator[Finding]:
    """All rules about the KV cache."""
    yield from _scheme(subject)
    stored: dict[str, dict[str, str]] = {}
    for name in subject.files.headers:
        match = _SCALE.fullmatch(name) if name.endswith("scale") else None
        if match:
            stored.setdefault(match["module"], {})[match["name"]] = name
    fp8 = cache_is_fp8(subject)
    if not stored:
        if fp8:
            yield from _without_scales(subject)
        return
    loading = _loading(subject)
    for module, names in stored.items():
        yield from _layer(subject, module, names, loading, fp8)
    for module in _attention(subject) - stored.keys():
        yield Finding("silently wrong", module, "no KV scale in this layer, though others have one: it runs at 1.0",
                      "calibrate all layers")  # fmt: skip


def _attention(subject: Subject) -> set[str]:
    """Attention modules with keys of their own, those of draft layers left out."""
    last = int(subject.files.text.get("num_hidden_layers") or 1 << 30)
    stems = {x.name.rpartition(".")[0] for x in subject.layers if x.name.endswith((".qkv_proj", ".k_proj"))}
    return {s for s in stems if (n := re.search(r"\.(\d+)\.\w+$", s)) and int(n[1]) < last}


def _scheme(subject: Subject) -> Iterator[Finding]:
    """Faults of `kv_cache_scheme` itself."""
    quant = subject.quant
    scheme = quant.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and subject.method == "compressed-tensors" and subject.rules.name == "vllm":
        if "symmetric" not in scheme:
            yield Finding("refused", "kv_cache_scheme", "the key `symmetric` is missing", "symmetric: true")
        if scheme.get("strategy") not in ("tensor", "attn_head") or scheme.get("num_bits") != 8:
            yield Finding("refused", "kv_cache_scheme", "only 8-bit float of a tensor or a head is known",
                          "num_bits 8, type float, strategy tensor")  # fmt: skip
    wanted_fp8 = isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    if wanted_fp8 and not cache_is_fp8(subject):
        yield Finding("silently wrong", "kv_cache_scheme", "not a scheme this engine takes: the cache stays in 16 bits",
                      "dynamic: false, strategy: tensor, symmetric: true")  # fmt: skip


def _without_scales(subject: Subject) -> Iterator[Finding]:
    """The cache is FP8 and there is no scale at all."""
    if attention_kind(subject.files.text) != "heads":
        yield Finding("ok", "kv_cache_scheme", "latent rows are cached in FP8 at scale 1.0, as engines want it")
        return
    yield Finding("silently wrong", "kv_cache_scheme", "the FP8 cache is on and no scale is stored: it runs at 1.0",
                  "calibrate KV scales, or take `kv_cache_scheme` out")  # fmt: skip


def _layer(subject: Subject, module: str, names: Mapping[str, str], loading: _Names, fp8: bool) -> Iterator[Finding]:
    """Scales of one attention layer."""
    loads = {
        letter: [full for n, full in names.items() if n in loading.of(letter) and _mixer(module, n)] for letter in "kv"
    }
    values = {full: subject.files.number(full) for full in names.values()}
    ones = all(v == 1.0 for v in values.values())
    latent = attention_kind(subject.files.text) != "heads"
    if latent and subject.rules.name == "sglang" and loads["k"] and not ones and None not in values.values():
        yield Finding("silently wrong", module, "latent rows (MLA) are written without k_scale and read with it",
                      "write 1.0 or no scale")  # fmt: skip
        return
    used = loads["k"] + loads["v"]
    if not used:
        if ones and latent:
            yield Finding("ok", module, "KV scales of 1.0 are dropped and the cache runs at 1.0")
        else:
            yield _dropped(subject, module, loading)
        return
    if not loads["k"]:
        yield Finding("refused" if subject.rules.name == "sglang" else "silently wrong", module,
                      "a v_scale without a k_scale", "write both")  # fmt: skip
        return
    if not loads["v"] and not latent and subject.rules.name != "sglang":  # SGLang takes the other's
        yield Finding("silently wrong", module, "a k_scale without a v_scale: values are stored at 1.0", "write both")
        return
    if any(len({values[n] for n in loads[letter]}) > 1 for letter in "kv"):
        yield Finding("silently wrong", module, "two copies of a KV scale that differ: the last one read wins",
                      "equal values under every name")  # fmt: skip
        return
    faults = [f for full in used for f in _sound(subject, full, values[full])]
    yield from faults
    if not faults:
        yield _reached(subject, module, fp8)


def _mixer(module: str, name: str) -> bool:
    """Attention inside a `mixer` (Nemotron-H) is known under ModelOpt's names only."""
    return not module.endswith(".mixer") or "_proj." in name


def _dropped(subject: Subject, module: str, loading: _Names) -> Finding:
    why = loading.why or "the class does not map these names"
    engine, kind = subject.rules.name, sglang_class(subject.model_type)
    fix = "serve with a 16-bit cache (--kv-cache-dtype bfloat16)"
    if engine == "sglang" and kind != "without" and not loading.why:
        fix = "`quantkit export RUN --engine sglang` writes the names that load"
    return Finding("silently wrong", module, f"KV scales are dropped, an FP8 cache runs at 1.0: {why}", fix)


def _reached(subject: Subject, module: str, fp8: bool) -> Finding:
    engine = subject.rules.name
    if engine == "trtllm":
        return Finding("not known", module, "KV scales load, but in the versions read FP8 caches run at 1.0")
    if (
        engine == "sglang"
        and sglang_class(subject.model_type) == "unknown"
        and attention_kind(subject.files.text) == "heads"
    ):
        return Finding("not known", module, f"whether the class of {subject.model_type} loads KV scales: look for a "
                       "warning when it starts")  # fmt: skip
    how = "and the FP8 cache is on" if fp8 else "and are used with --kv-cache-dtype fp8_e4m3"
    return Finding("ok", module, f"KV scales reach attention {how}")


def _sound(subject: Subject, name: str, value: float | None) -> Iterator[Finding]:
    """Dtype, shape and value of one scale that loads."""
    header = subject.files.headers[name]
    count = math.prod(header.shape)
    per_head = (subject.quant.get("kv_cache_scheme") or {}).get("strategy") == "attn_head"
    strict = subject.rules.name in ("transformers", "trtllm")
    if (count != 1 and not per_head) or (strict and header.shape not in ((1,), ())):
        yield Finding("refused", name, f"a KV scale of shape {list(header.shape)}: one number is wanted",
                      "float32 of shape [1]")  # fmt: skip
    if header.dtype != "F32":
        yield Finding("silently wrong", name, f"a KV scale in {header.dtype}: rounded, large values clip",
                      "float32")  # fmt: skip
    if value is None or count != 1:
        return
    if not (math.isfinite(value) and value > 0):
        yield Finding(
            "silently wrong", name, "a KV scale that is not positive counts as missing: 1.0 is used", "calibrate"
        )
    elif value > _LARGEST:
        yield Finding("silently wrong", name, "a KV scale above 16 stands for values beyond 7168: it looks like "
                      "448 / amax or amax, not amax / 448", "store amax / 448")  # fmt: skip
    algorithm = str((subject.files.nested or {}).get("quantization", {}).get("kv_cache_quant_algo") or "")
    if (
        "NVFP4" in (algorithm, subject.quant.get("kv_cache_quant_algo"))
        and value != 1.0
        and subject.rules.name == "sglang"
    ):
        yield Finding("silently wrong", name, "NVFP4 KV cache: multiplied by 6 on SM100, taken as it is on SM120",
                      "1.0, or a checkpoint for one generation of GPUs")  # fmt: skip

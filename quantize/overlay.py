"""A calibration run laid over its source: what `export` then plans, writes and verifies like any other checkpoint.

A run folder holds the calibrated layers in their final numbers (`weights/*.safetensors` under compressed-tensors names:
codes and scales that pass bit for bit into any format), plain tensors that a method changed, and the scales of the KV
cache. Each takes the place of the tensors of the same layer; everything else is the source's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quantkit.export.checkpoint import Checkpoint, quantization_config, read_tensors, with_quantization
from quantkit.export.formats import FP8_KV
from quantkit.export.safetensors_file import TensorInfo
from quantkit.export.sources.detect import Weight, weights_of
from quantkit.kernels.errors import QuantkitError

WEIGHTS = "weights"


def overlaid(source: Checkpoint, run: Path, *, kv: Path | None = None, fp8_kv: bool = False) -> Checkpoint:
    """The source with the tensors of a run in place of its own.

    kv      a file of KV-cache scales under the names of an engine
    fp8_kv  the configuration switches an FP8 cache on: without that engines do not look for scales

    Raises QuantkitError when the run replaces a layer that the source does not have.
    """
    files = [*sorted((run / WEIGHTS).glob("*.safetensors")), *([] if kv is None else [kv])]
    found = read_tensors(files)
    ours = weights_of(replace(source, tensors=found))
    theirs = weights_of(source)
    gone: set[str] = set()
    for name, weight in ours.items():
        if name in theirs:
            if not _same_shape(theirs[name], weight):
                raise QuantkitError(
                    "a layer of the run has another shape than the source's", file=run, tensor=name,
                    value=list(weight.shape), allowed=list(theirs[name].shape),
                    hint="the run was made from another checkpoint",
                )  # fmt: skip
            gone.update(t.name for t in (*theirs[name].parts.values(), *theirs[name].extra))
        elif not name.endswith(("k_scale", "v_scale")):
            raise QuantkitError(
                "a layer of the run is not in the source", file=run, tensor=name,
                hint="the run was made from another checkpoint",
            )  # fmt: skip
    tensors: dict[str, TensorInfo] = {n: t for n, t in source.tensors.items() if n not in gone} | found
    config = source.config
    if fp8_kv:  # wherever the configuration describes its quantisation
        quant = {**quantization_config(config), "kv_cache_scheme": FP8_KV}
        config = with_quantization(config, quant)
    return replace(source, config=config, tensors=tensors, calibrated=frozenset(ours))


def _same_shape(source: Weight, ours: Weight) -> bool:
    """Whether the shapes are the same: codes of fused experts are [E, O, I], plain ones may be [E, I, O] (gpt-oss)."""
    shape = source.shape
    turned = len(shape) == 3 and source.encoding == "plain" and ours.encoding != "plain"
    return ours.shape == shape or (turned and ours.shape == (shape[0], shape[2], shape[1]))

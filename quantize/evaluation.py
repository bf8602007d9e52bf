"""Perplexity, KL and top-1 agreement of a checkpoint against its source, both run block by block.

With `kv` the candidate's keys and values pass through an FP8 cache under the scales that the checkpoint stores, by the
encoder and decoder of the attention kernels; a layer without a stored scale uses 1.0, as engines do.

Letters: T tokens, H KV heads, D values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from quantkit.calibrate.blocks import open_model
from quantkit.calibrate.evaluate import evaluate
from quantkit.calibrate.observe import Cache
from quantkit.calibrate.perplexity import Scores
from quantkit.calibrate.tokens import Samples
from quantkit.export.checkpoint import Checkpoint, Reader
from quantkit.export.sources.detect import weights_of
from quantkit.kernels.kv_rows import decode_rows, encode_rows
from quantkit.quantize.decoded import DecodedWeights
from quantkit.quantize.kv_run import stored_scales
from quantkit.quantize.roles import roles_of
from torch import Tensor


def compare_checkpoints(
    candidate: Checkpoint, source: Checkpoint, samples: Samples, *, kv: bool, memory: int, device: str = "cpu",
    trust_remote_code: bool = False, folder: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scores:  # fmt: skip
    """Scores of the candidate on token ids; `memory` bounds hidden states and each block, in bytes."""
    with Reader() as reader:
        models = [
            open_model(c.folder, DecodedWeights(c, reader), device=device, trust_remote_code=trust_remote_code)
            for c in (source, candidate)
        ]
        ids = list(torch.from_numpy(samples.ids_NL).long())
        cache = fp8_cache(candidate, reader) if kv else None
        return evaluate(models[0], models[1], ids, cache=cache, memory=memory, folder=folder, progress=progress)


def fp8_cache(checkpoint: Checkpoint, reader: Reader) -> Cache:
    """What an FP8 cache makes of keys and values under the scales of a checkpoint."""
    weights = weights_of(checkpoint)
    placed, _ = roles_of({n: w.shape for n, w in weights.items()}, checkpoint.config)
    scales = stored_scales(weights, placed, reader)

    def through(layer: int, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        k_scale, v_scale = scales.get(layer, (1.0, 1.0))
        return _rounded(k_THD, k_scale), _rounded(v_THD, v_scale)

    return through


def _rounded(x_THD: Tensor, scale: float) -> Tensor:
    if not x_THD.numel():  # MLA has no values of its own
        return x_THD
    codes, block_scale = encode_rows(x_THD.float(), "e4m3", scale)
    return decode_rows(codes, "e4m3", scale, block_scale).to(x_THD.dtype)

"""Perplexity, KL and top-1 agreement of a checkpoint against its source, both run block by block.

The candidate runs as it is served: where its configuration has activations quantised, the inputs of those layers are.
With `kv` its keys and values pass through an FP8 cache under the scales that it stores, by the encoder and decoder of
the attention kernels; a layer without a stored scale uses 1.0, as engines do. The source runs as decoded weights alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from quantkit.calibrate.blocks import open_model
from quantkit.calibrate.evaluate import evaluate
from quantkit.calibrate.kv_errors import CacheErrors, LayerError, fp8_cache
from quantkit.calibrate.perplexity import Scores
from quantkit.calibrate.tokens import Samples
from quantkit.export.checkpoint import Checkpoint, Reader
from quantkit.export.sources.detect import weights_of
from quantkit.kernels.errors import QuantkitError
from quantkit.quantize.decoded import DecodedWeights
from quantkit.quantize.kv_run import stored_scales, usable
from quantkit.quantize.roles import roles_of
from quantkit.quantize.served_inputs import asked_activations, served_layers


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found.

    kv           attention outputs under the FP8 cache, layer by layer; empty without one
    activations  how the checkpoint has activations quantised -> in how many layers; also when only weights were run
    """

    scores: Scores
    kv: tuple[LayerError, ...]
    activations: Mapping[str, int]


def compare_checkpoints(
    candidate: Checkpoint, source: Checkpoint, samples: Samples, *, kv: bool, memory: int, weights_only: bool = False,
    device: str = "cpu", trust_remote_code: bool = False, folder: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:  # fmt: skip
    """The candidate on token ids; `memory` bounds hidden states and each block, in bytes.

    Raises QuantkitError when the models differ, a stored scale is unusable, or activations are quantised in a form that
    is not computed (unless `weights_only`).
    """
    with Reader() as reader:
        weights = weights_of(candidate)
        placed, _ = roles_of({n: w.shape for n, w in weights.items()}, candidate.config)
        asked = asked_activations(candidate, weights, placed)
        served = {} if weights_only else served_layers(asked, weights, placed, reader)
        models = [
            open_model(
                c.folder, DecodedWeights(c, reader), device=device, trust_remote_code=trust_remote_code, served=layers
            )
            for c, layers in ((source, {}), (candidate, served))
        ]  # fmt: skip
        ids = list(torch.from_numpy(samples.ids_NL).long())
        scales = stored_scales(weights, placed, reader) if kv else {}
        for layer, pair in scales.items():
            if not all(map(usable, pair)):
                raise QuantkitError(
                    "a KV scale that is no scale", file=candidate.folder, tensor=f"layer {layer}", value=list(pair),
                    allowed="positive normal float32 numbers", hint="`quantkit verify` names the tensors",
                )  # fmt: skip
        errors = CacheErrors(scales) if kv else None
        scores = evaluate(
            models[0], models[1], ids, cache=fp8_cache(scales) if kv else None,
            compare=None if errors is None else errors.compare, memory=memory, folder=folder, progress=progress,
        )  # fmt: skip
    counts = Counter(a.title for a in asked.values())
    return Evaluation(scores, () if errors is None else errors.finish(), dict(sorted(counts.items())))

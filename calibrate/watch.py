"""What a calibration run watches in one block: Hessians of sets of layers, the KV cache, samples of real inputs.

Letters: T tokens, I inputs, H KV heads, Q query heads, D head values, C values of a latent row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from quantkit.calibrate.kv import KVStats
from quantkit.calibrate.stats import Hessian, HessianSum, blend
from torch import Tensor

SAMPLE_TOKENS = 8  # of the inputs of a layer, kept for the packed kernels
_EXPERT = re.compile(r"\.experts\.\d+\.")


class Watch:
    """An observer of one block.

    sets     layers with one input each, whose Hessians are wanted
    kv       statistics of keys and values, or None
    sampled  modules of which some inputs are kept
    length   tokens of each text: what is run together is told apart in the cache
    """

    def __init__(
        self, sets: Iterable[tuple[str, ...]] = (), kv: KVStats | None = None, sampled: Iterable[str] = (),
        length: int = 0, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.kv_stats = kv
        self.samples: dict[str, Tensor] = {}
        self._sums: dict[str, HessianSum] = {}  # by the first module of a set
        self._layers: dict[str, Hessian] = {}  # of all experts of a layer, once the watch is over
        self._wanted = {names[0] for names in sets}
        self._sampled = set(sampled)
        self._length = length
        self._device = device

    def linear(self, modules: tuple[str, ...], x_TI: Tensor) -> None:
        """Inputs of one set of layers."""
        first = modules[0]
        if first in self._wanted:
            if first not in self._sums:
                self._sums[first] = HessianSum(x_TI.shape[1], self._device)
            self._sums[first].update(x_TI)
        for name in self._sampled.intersection(modules):
            if name not in self.samples and len(x_TI) >= SAMPLE_TOKENS:
                # spread over the sample: the first tokens of a text are unlike all others
                self.samples[name] = x_TI[:: len(x_TI) // SAMPLE_TOKENS][:SAMPLE_TOKENS].bfloat16().clone()

    def kv(self, layer: int, q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor) -> None:
        """Keys and values as an engine caches them."""
        if self.kv_stats is not None:
            texts = [torch.split(x, self._length or len(x)) for x in (k_THD, v_THD, q_TQD)]
            for k, v, q in zip(*texts, strict=True):
                self.kv_stats.update(layer, k, v, q)

    def latent(self, layer: int, row_TC: Tensor) -> None:
        """Rows of an MLA cache."""
        if self.kv_stats is not None:
            for rows in torch.split(row_TC, self._length or len(row_TC)):
                self.kv_stats.latent(layer, rows)

    def hessian(self, names: tuple[str, ...], inputs: int) -> Hessian:
        """The Hessian of the one input of a set of modules; of a routed expert blended with that of its layer."""
        own = self._sums.get(names[0])
        seen = own.finish() if own is not None else HessianSum(inputs, self._device).finish()
        kind = _EXPERT.sub(".experts.*.", names[0])
        if kind == names[0]:
            return seen
        if kind not in self._layers:
            self._layers[kind] = self._of_layer(kind, inputs)
        return blend(seen, self._layers[kind])

    def _of_layer(self, kind: str, inputs: int) -> Hessian:
        """All experts' inputs together: every token counts once for each expert that it was sent to."""
        total = HessianSum(inputs, self._device)
        for name, record in self._sums.items():
            if _EXPERT.sub(".experts.*.", name) == kind:
                total.merge(record)
        return total.finish()

"""What a calibration run watches in one block: Hessians and ranges of inputs, the KV cache, samples of real inputs.

Letters: T tokens, I inputs, H KV heads, Q query heads, D head values, C values of a latent row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from quantkit.calibrate.input_blocks import InputBlocks, InputBlocksSum
from quantkit.calibrate.kv import KVStats
from quantkit.calibrate.stats import Hessian, HessianSum, PeerHessianSum, blend
from quantkit.kernels.errors import QuantkitError
from torch import Tensor

SAMPLE_TOKENS = 8  # of the inputs of a layer, kept for the packed kernels
# Share of a layer's tokens that may hold a NaN or infinity. One bad token spoils its whole sample (a masked value still
# enters attention, as 0 x NaN): a share above this means that the source or the dtype is at fault, not a rare token.
MAX_DROPPED = 0.01
# Of the tokens that an expert sees in a batch, those that count for its whole layer: a quarter of the inputs' number of
# them is what its Hessian is blended with, so a sample will do.
PEER_TOKENS = 8
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)|(?<=_proj\.)\d+$")


def peers_key(module: str) -> str:
    """One name for the modules at this place in all experts of a layer; the module's own outside of experts."""
    return _EXPERT.sub("*", module)


class Watch:
    """An observer of one block.

    sets     layers with one input each, whose Hessians are wanted
    blocks   layers with one input each, whose ranges by blocks of 16 are wanted
    kv       statistics of keys and values, or None
    sampled  modules of which some inputs are kept
    length   tokens of each text: what is run together is told apart in the cache
    peers    sums over all experts of a layer, by `peers_key`, from an earlier watch of the block: experts come in waves
             whose number must not show in a Hessian. Gathered here, for every expert that runs, when None
    """

    def __init__(
        self, sets: Iterable[tuple[str, ...]] = (), kv: KVStats | None = None, sampled: Iterable[str] = (),
        length: int = 0, device: str = "cpu", blocks: Iterable[tuple[str, ...]] = (),
        peers: dict[str, PeerHessianSum] | None = None,
    ) -> None:  # fmt: skip
        self.kv_stats = kv
        self.samples: dict[str, Tensor] = {}
        self._sums: dict[str, HessianSum] = {}  # by the first module of a set
        self._blocks = {names[0]: InputBlocksSum() for names in blocks}
        self._layers: dict[str, Hessian] = {}  # of all experts of a layer, once the watch is over
        self._wanted = {names[0] for names in sets}
        self._gathers = peers is None and any(peers_key(n) != n for n in self._wanted)
        self.peers: dict[str, PeerHessianSum] = {} if peers is None else peers
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
        if self._gathers and peers_key(first) != first:
            self._peers_of(peers_key(first), x_TI.shape[1]).update(x_TI[:: -(-len(x_TI) // PEER_TOKENS)].clone())
        if first in self._blocks:
            self._blocks[first].update(x_TI)
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
        kind = peers_key(names[0])
        if kind == names[0]:
            return seen
        if kind not in self._layers:
            self._layers[kind] = self._peers_of(kind, inputs).finish()
        return blend(seen, self._layers[kind])

    def forget(self, names: tuple[str, ...]) -> None:
        """Free the Hessian of a set whose codes are chosen."""
        self._sums.pop(names[0], None)

    def _peers_of(self, kind: str, inputs: int) -> PeerHessianSum:
        """All experts' inputs together: a token counts once for each expert that it was sent to."""
        if kind not in self.peers:
            self.peers[kind] = PeerHessianSum(inputs, self._device)
        return self.peers[kind]

    def input_blocks(self, names: tuple[str, ...]) -> InputBlocks:
        """The ranges of the one input of a set of modules, of no tokens when none came."""
        return self._blocks[names[0]].finish()

    def check_finite(self) -> None:
        """Raise QuantkitError for the first layer that lost too large a share of its tokens, experts as one layer."""
        seen: dict[str, list[int]] = {}
        records: list[tuple[str, HessianSum | InputBlocksSum]] = [*self._sums.items(), *self._blocks.items()]
        for name, record in records:
            counts = seen.setdefault(peers_key(name), [0, 0])
            counts[0] += record.dropped
            counts[1] += record.tokens + record.dropped
        for name, (dropped, tokens) in seen.items():
            if dropped > MAX_DROPPED * tokens:
                raise QuantkitError(
                    "too many tokens have NaN or infinity in the inputs of a layer", tensor=name,
                    value=f"{dropped} of {tokens} tokens, {dropped / tokens:.1%}", allowed=f"at most {MAX_DROPPED:.0%}",
                    hint="a weight of the source is damaged, or its values overflow the dtype of the run",
                )  # fmt: skip

"""Statistics of what an engine puts in its KV cache: enough for every rule of a scale, small enough for any text.

Measured are keys after RoPE and q/k norm, values, and for MLA the normalised latent and the roped key (k_pe) in one
row: never the output of k_proj, never the expanded heads of MLA. Kept of each layer: the largest magnitude (amax) of
every KV head, a histogram of all magnitudes, a bound on keys that holds at any position, and the rows of one short run
of tokens for the kernels. Nothing else grows with the text.

RoPE rotates pairs of a key's values by an angle that grows with the position, so the amax of short text may be passed
in long text, but never by more than the length of a pair allows: hypot(a, b), the same at every position.

A token with NaN or infinity in its key or value (or row) is left out as a whole and counted. Counts and amax are exact,
and so is the merge of two records: the same as one pass over the first's calls, then the second's.

Letters: T tokens, H KV heads, Q query heads, D head values, C latent + RoPE values of an MLA cache row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from quantkit.calibrate.kv_records import LayerKV, Seen
from quantkit.calibrate.kv_scan import Rope, Sums, finite_tokens, nothing, scan
from quantkit.calibrate.log2_histogram import Histogram
from quantkit.kernels.errors import QuantkitError
from torch import Tensor

# model types whose captured keys hold rotated pairs side by side; all others rotate one half against the other. That
# is the layout transformers' code returns: DeepSeek's too is in halves there, though its weights are interleaved.
_INTERLEAVED = frozenset({
    "cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium",
})  # fmt: skip


def rope_of(config: Mapping[str, Any]) -> Rope:
    """The pairing of a model's captured keys, from the (text) config.json; `partial_rotary_factor` limits its width."""
    kind = str(config.get("model_type", ""))
    parameters = config.get("rope_parameters") or {}
    part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    width = None
    if part and part < 1 and not config.get("kv_lora_rank"):
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        width = int(head * part)
    return Rope(width, kind.removesuffix("_text") in _INTERLEAVED)


@dataclass(slots=True)
class _Layer:
    """The running sums of a layer: by "k", "v", "pe"; `rows` is the sample, by the names of calibration.safetensors."""

    shapes: dict[str, tuple[int, ...]]
    tokens: int = 0
    dropped: int = 0
    longest: int = 0
    sums: dict[str, Sums] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)

    def sampled(self) -> int:
        return len(next(iter(self.rows.values()))) if self.rows else 0


class KVStats:
    """Sums over the calls of an `Observer`, on any device; statistics are of the float32 values.

    rope    pairing of keys, `rope_of(config)`; None: keys are not rotated, or how is not known: the bound is the amax
    rank    kv_lora_rank of MLA: a row's first `rank` values are the latent, the rest is the roped key
    sample  tokens kept for the kernels, from the start of the first text that has as many (else of the longest)
    """

    def __init__(self, rope: Rope | None = None, rank: int | None = None, sample: int = 64) -> None:
        self.rope, self.rank, self.sample = rope, rank, sample
        self._layers: dict[int, _Layer] = {}

    def update(self, layer: int, k_THD: Tensor, v_THD: Tensor, q: Tensor | None = None) -> None:
        """Keys [T, H, D] and values [T, H, D] of one text, and the queries [T, Q, D] of its tokens for the sample.

        Raises QuantkitError when shapes do not fit together or are not those of earlier texts.
        """
        rows = {"k": k_THD, "v": v_THD} | ({} if q is None else {"q": q})
        fit = all(x.ndim == 3 and len(x) == len(k_THD) for x in rows.values())
        if not fit or k_THD.shape[1] != v_THD.shape[1] or (q is not None and q.shape[1] % max(1, k_THD.shape[1])):
            raise _misfit(layer, rows, "k and v [T, H, D], q [T, multiple of H, D]")
        self._add(layer, rows, {"k": (k_THD, self.rope), "v": (v_THD, None)})

    def latent(self, layer: int, row_TC: Tensor) -> None:
        """Cache rows [T, C] of MLA of one text; raises QuantkitError as `update` does."""
        if row_TC.ndim != 2 or (self.rank is not None and not 0 < self.rank < row_TC.shape[1]):
            raise _misfit(layer, {"latent": row_TC}, f"[T, {self.rank or 'rank'} + RoPE values]")
        row_T1C = row_TC[:, None, :]
        if self.rank is None:
            parts: dict[str, tuple[Tensor, Rope | None]] = {"k": (row_T1C, None)}
        else:
            whole = None if self.rope is None else Rope(None, self.rope.interleaved)
            parts = {"k": (row_T1C[..., : self.rank], None), "pe": (row_T1C[..., self.rank :], whole)}
        self._add(layer, {"latent": row_TC}, parts)

    def _add(self, layer: int, rows: Mapping[str, Tensor], parts: Mapping[str, tuple[Tensor, Rope | None]]) -> None:
        shapes = {name: tuple(x.shape[1:]) for name, x in rows.items()}
        state = self._layers.setdefault(layer, _Layer(shapes))
        if state.shapes != shapes:
            raise _misfit(layer, rows, "the shapes of earlier texts, " + _shapes(state.shapes))
        good_T = torch.stack([finite_tokens(x) for x, _ in parts.values()]).all(0)
        good = int(good_T.sum())
        state.tokens += good
        state.dropped += len(good_T) - good
        state.longest = max(state.longest, len(good_T))
        for name, (x, rope) in parts.items():
            sums = scan(x if good == len(good_T) else x[good_T], rope)
            state.sums.setdefault(name, nothing(x.shape[1])).add(sums)
        if min(good, self.sample) > state.sampled():
            for x in rows.values():
                good_T = good_T & finite_tokens(x)  # of the queries as well
            first = good_T.nonzero()[: self.sample, 0]
            if len(first) > state.sampled():
                state.rows = {name: x[first].to("cpu", torch.bfloat16).contiguous() for name, x in rows.items()}

    def merge(self, other: KVStats) -> None:
        """Add what `other` saw after this; raises QuantkitError when the two measured differently."""
        if (self.rope, self.rank, self.sample) != (other.rope, other.rank, other.sample):
            raise QuantkitError("KV statistics of different settings cannot be added up")
        for layer, theirs in other._layers.items():
            ours = self._layers.setdefault(layer, _Layer(theirs.shapes))
            if ours.shapes != theirs.shapes:
                raise QuantkitError(
                    "KV statistics of different shapes cannot be added up", tensor=f"kv.{layer}",
                    value=_shapes(theirs.shapes), allowed=_shapes(ours.shapes),
                )  # fmt: skip
            ours.tokens += theirs.tokens
            ours.dropped += theirs.dropped
            ours.longest = max(ours.longest, theirs.longest)
            for name, sums in theirs.sums.items():
                ours.sums.setdefault(name, nothing(len(sums.head_amax))).add(sums)
            if theirs.sampled() > ours.sampled():
                ours.rows = dict(theirs.rows)

    def finish(self) -> tuple[LayerKV, ...]:
        """The layers in their order."""
        return tuple(
            LayerKV(layer, s.tokens, s.dropped, s.longest, **{name: _seen(sums) for name, sums in s.sums.items()})
            for layer, s in sorted(self._layers.items())
        )

    def samples(self) -> dict[str, Tensor]:
        """`kv.LAYER.k`, `.v`, `.q` or `.latent`: the kept rows, bfloat16 on the CPU."""
        layers = sorted(self._layers.items())
        return {f"kv.{layer}.{name}": rows for layer, s in layers for name, rows in s.rows.items()}


def _seen(sums: Sums) -> Seen:
    return Seen(tuple(sums.head_amax.tolist()), tuple(sums.head_bound.tolist()), Histogram.of(sums.counts))


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} [T, {', '.join(map(str, shape))}]" for name, shape in shapes.items())


def _misfit(layer: int, rows: Mapping[str, Tensor], allowed: str) -> QuantkitError:
    value = ", ".join(f"{name} {list(x.shape)}" for name, x in rows.items())
    return QuantkitError("keys and values do not fit together", tensor=f"kv.{layer}", value=value, allowed=allowed)

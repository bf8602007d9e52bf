"""What a replay serves: requests with shared beginnings, and a model small enough to leave the time to the attention.

The model is one attention layer. The query, key and value of a token are fixed random vectors of the token plus ones of
its position; the next token is the largest entry of a fixed random projection of the attention output. Scores have a
standard deviation near 2, so a few dozen cached tokens carry each output, and a page that is not the right one
changes the tokens that follow. With one layer only the last token of a prompt needs a query: to prefill is to write
keys and values, which is what a decode pool does when it receives them from a prefill pool.

Shape suffixes: T tokens, R requests, Q query heads, H KV heads, D values of a head, V vocabulary, N positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

VOCABULARY = 512
_POSITIONS = 97  # position vectors repeat; prime, so not in step with pages


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of the attention layer; `query` is a multiple of `kv`."""

    query: int = 32
    kv: int = 8
    dim: int = 128


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Arrives at step `arrival` with this prompt and wants `new_tokens` more."""

    arrival: int
    prompt_T: I32  # noqa: N815
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A stream of requests; each length is drawn evenly from its (smallest, largest).

    prefixes, prefix_tokens  so many system prompts of that length; each request begins with one of them (0: none)
    repeat                   share of requests whose prompt continues the prompt of an earlier one: a hit inside a page
    per_step                 requests that arrive at each step; 0: all at once
    """

    requests: int
    prompt: tuple[int, int]
    new_tokens: tuple[int, int]
    prefixes: int = 0
    prefix_tokens: int = 0
    repeat: float = 0.0
    per_step: int = 0
    seed: int = 0


def make_requests(w: Workload) -> list[Request]:
    """The requests of a workload, the same for the same workload."""
    rng = np.random.default_rng(w.seed)
    prefixes = rng.integers(0, VOCABULARY, (max(w.prefixes, 1), w.prefix_tokens), np.int32)
    out: list[Request] = []
    for r in range(w.requests):
        own = rng.integers(0, VOCABULARY, rng.integers(w.prompt[0], w.prompt[1] + 1), np.int32)
        head = prefixes[rng.integers(len(prefixes))]
        if out and rng.random() < w.repeat:
            head = out[rng.integers(len(out))].prompt_T
            head = head[: max(len(head) - int(rng.integers(1, 8)), 1)]
        arrival = r // w.per_step if w.per_step else 0
        new_tokens = int(rng.integers(w.new_tokens[0], w.new_tokens[1] + 1))
        out.append(Request(arrival, np.concatenate((head, own)), new_tokens))
    return out


class Model:
    """Fixed random vectors; see above. Everything it returns is a function of tokens and positions alone."""

    def __init__(self, heads: Heads, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> F32:
            return rng.standard_normal(shape, np.float32)

        self.heads = heads
        self.softmax_scale = heads.dim**-0.5
        self._k_VHD, self._k_NHD = draw(VOCABULARY, heads.kv, heads.dim), draw(_POSITIONS, heads.kv, heads.dim)
        self._v_VHD, self._v_NHD = draw(VOCABULARY, heads.kv, heads.dim), draw(_POSITIONS, heads.kv, heads.dim)
        self._q_VQD, self._q_NQD = draw(VOCABULARY, heads.query, heads.dim), draw(_POSITIONS, heads.query, heads.dim)
        self._sign_Q1 = np.where(rng.random((heads.query, 1)) < 0.5, np.float32(-1), np.float32(1))
        self._out_DV = draw(heads.dim, VOCABULARY)

    def keys_values(self, tokens_T: I32, positions_T: I32) -> tuple[F32, F32]:
        """float32 k, v [T, H, D]."""
        n = positions_T % _POSITIONS
        return self._k_VHD[tokens_T] + self._k_NHD[n], self._v_VHD[tokens_T] + self._v_NHD[n]

    def queries(self, tokens_T: I32, positions_T: I32) -> F32:
        """float32 q [T, Q, D]."""
        q: F32 = self._q_VQD[tokens_T] + self._q_NQD[positions_T % _POSITIONS]
        return q

    def next_tokens(self, o_TQD: F32) -> I32:
        """Tokens [T] that follow these attention outputs."""
        best_T: I32 = np.argmax((o_TQD * self._sign_Q1).sum(1) @ self._out_DV, 1).astype(np.int32)
        return best_T

"""Loops of the page tags: stamping pages, the batch check, prefix keys and content hashes.

Every hash here is a chain of splitmix64 finalisers (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014): h = mix(h ^ value). `mix` is a bijection of 64 bits, so a chain that differs in its last value alone
never collides; one that differs earlier collides with probability 2^-64.

Shape suffixes: P physical pages, L logical pages of a request, S request slots, N events, R rows to check, T tokens.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

B1 = NDArray[np.bool_]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)
_FROZEN = np.uint64(1)  # lowest bit of a generation word
_NEXT = np.uint64(2)  # one allocation


@njit(nogil=True, cache=True)
def mix(x: np.uint64) -> np.uint64:
    """First output of splitmix64 seeded with x: a bijection of 64 bits."""
    z = x + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MUL_1
    z = (z ^ (z >> np.uint64(27))) * _MUL_2
    return z ^ (z >> np.uint64(31))


@njit(nogil=True, cache=True)
def stamp(
    slots_N: I32, positions_N: I32, pages_N: I32, seed: np.uint64,
    tag_P: U64, generation_P: U64, granted_SL: I32, expected_SL: U64, suspect_S: B1,
) -> None:  # fmt: skip
    """Begin a new life of each page and note it in the ledger of the request that gets it.

    In order, because a page that is handed out twice within one call must end with the tag of the second life alone.
    A page that takes the place of another (copy on write) was filled from it: that one must still have been right.
    """
    for n in range(len(pages_N)):
        s, i, p = slots_N[n], positions_N[n], pages_N[n]
        old = granted_SL[s, i]
        if old >= 0 and tag_P[old] != expected_SL[s, i]:
            suspect_S[s] = True
        generation = (generation_P[p] | _FROZEN) + _FROZEN  # the next even number: not frozen
        generation_P[p] = generation
        tag_P[p] = mix(mix(mix(seed ^ np.uint64(i)) ^ np.uint64(p)) ^ generation)
        granted_SL[s, i] = p
        expected_SL[s, i] = tag_P[p]


@njit(nogil=True, cache=True)
def check_rows(
    slots_R: I32, counts_R: I32, writes_R: I32, table_SL: I32,
    tag_P: U64, generation_P: U64, expected_SL: U64, suspect_S: B1, bad_R: B1,
) -> int:  # fmt: skip
    """One pass over all pages of all rows; bad_R gets True where a row must not run. Returns the pages compared.

    counts_R  pages in the block table of the row
    writes_R  first logical page that the row is about to write; the row's count where it writes nothing
    """
    pages = np.uint64(len(tag_P))
    compared = 0
    for r in range(len(slots_R)):
        s = slots_R[r]
        wrong = np.uint64(suspect_S[s])
        for i in range(counts_R[r]):
            p = np.uint64(table_SL[s, i])  # a negative number becomes a huge one
            if p >= pages:
                wrong = np.uint64(1)
            else:
                wrong |= tag_P[p] ^ expected_SL[s, i]
                if i >= writes_R[r]:
                    wrong |= generation_P[p] & _FROZEN
        bad_R[r] = wrong != np.uint64(0)
        compared += counts_R[r]
    return compared


@njit(nogil=True, cache=True)
def prefix_keys(tokens_T: I32, page_size: int, seed: np.uint64) -> U64:
    """One key for each whole page of tokens: a chain over every token from the first to the last of that page."""
    keys_L = np.empty(len(tokens_T) // page_size, np.uint64)
    key = seed
    for i in range(len(keys_L)):
        for t in range(i * page_size, (i + 1) * page_size):
            key = mix(key ^ np.uint64(tokens_T[t]))
        keys_L[i] = key
    return keys_L


@njit(nogil=True, cache=True)
def hash_words(words_PW: U64, pages_N: I64, hash_N: U64) -> None:
    """Fold the words W of each page into its hash; four chains side by side, as one would wait for its multiplies."""
    for n in range(len(pages_N)):
        p = pages_N[n]
        a, b, c, d = hash_N[n], np.uint64(1), np.uint64(2), np.uint64(3)
        width = words_PW.shape[1]
        whole = width // 4 * 4
        for w in range(0, whole, 4):
            a = mix(a ^ words_PW[p, w])
            b = mix(b ^ words_PW[p, w + 1])
            c = mix(c ^ words_PW[p, w + 2])
            d = mix(d ^ words_PW[p, w + 3])
        for w in range(whole, width):
            a = mix(a ^ words_PW[p, w])
        hash_N[n] = mix(mix(mix(a ^ b) ^ c) ^ d)

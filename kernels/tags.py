"""Page tags: proof, before every read, that a request still owns the cache pages that it is about to read.

Hundreds of requests share one paged cache, and one wrong entry in a block table shows a user another user's text. So
each physical page carries a tag that changes whenever the page is handed out or given back, each request keeps a
ledger of the pages it was given with the tags they had, and one batch check compares the two right before the
attention kernel (after "Protecting a shared KV cache", Cloudflare, August 2026). A mismatch condemns one request.

    sidecar, 16 bytes a page    generation = 2 x allocations so far + 1 if frozen; tag = chain(seed, position, page,
                                generation) while the page is in use, 0 while it is free
    ledger, 12 bytes an entry   page and tag of every logical page of every request slot

- The chain ends with the generation, so two lives of a page at one position never have one tag. An allocation counter
  of `bits` bits that has run its course retires its page: it is never handed out again, so no tag ever comes round.
- No owner goes into the tag: a page of a shared prefix must be valid for every holder, and lies at the same position
  for all of them. Who may use a tag is said by the ledgers.
- A page filed in the prefix tree is frozen until it is freed. A request that is about to write a frozen page has lost a
  copy on write. The tree keeps the tag masked with a key of all tokens up to the end of the page; a request unmasks it
  with the key of its own tokens, so a hit on a wrong page gives a tag that no page has.
- The check comes before the step's writes and reads. What a step computed may be shown or filed only after the *next*
  check: a page reused in between is then caught with its output still withheld.

What tags cannot see: wrong bytes in the right page (a stray write, a flipped bit, wrong keys and values from the model)
and a fault that ends before the next check with the same life of the page still in place. `ContentSeals` covers the
bytes of frozen pages, on demand. Tags guard against faults, not against a program that can write the sidecar.

Shape suffixes: P physical pages, L logical pages of a request, S request slots, N events, R rows to check, T tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.cpu import tags as loops
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import KVCache

B1 = NDArray[np.bool_]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_NO_ROWS: B1 = np.zeros(0, np.bool_)


class Tracker(Protocol):
    """What the allocator tells a tracker, and what it asks. `slot` is the place of a request, not its name."""

    def grant(self, slots_N: I32, positions_N: I32, pages_N: I32) -> None:
        """Pages were handed out, each to one request at one logical position."""

    def share(self, slot: int, tokens_T: I32, pages_L: I32, words_L: U64) -> int:
        """A prefix hit gave `slot` the first pages of `tokens_T`; returns how many of them, in order, are genuine."""
        ...

    def file(self, slot: int, tokens_T: I32, pages_L: I32) -> tuple[U64, U64]:
        """The last pages of `tokens_T` (whole pages) enter the prefix tree: their tags, and their masked tags."""
        ...

    def free(self, pages_N: I32) -> I32:
        """The last holder let go; returns the pages that may be handed out again."""
        ...

    def held(self, slot: int, pages_L: I32) -> I32:
        """The pages that `slot` has a right to give back; `pages_L` is its block table."""
        ...

    def owns(self, page: int, tag: int) -> bool:
        """Whether `page` is still in the life in which it had this tag."""
        ...

    def check(self, slots_R: I32, counts_R: I32, writes_R: I32, table_SL: I32) -> B1:
        """True for each row that must not run; an empty array where nothing is checked."""
        ...


class NullTracker:
    """Keeps nothing, checks nothing, trusts every page: the default."""

    def grant(self, slots_N: I32, positions_N: I32, pages_N: I32) -> None:
        """Nothing to do."""

    def share(self, slot: int, tokens_T: I32, pages_L: I32, words_L: U64) -> int:
        """All genuine."""
        return len(pages_L)

    def file(self, slot: int, tokens_T: I32, pages_L: I32) -> tuple[U64, U64]:
        """Tags of nobody."""
        none = np.zeros(len(pages_L), np.uint64)
        return none, none

    def free(self, pages_N: I32) -> I32:
        """All of them."""
        return pages_N

    def held(self, slot: int, pages_L: I32) -> I32:
        """All of them."""
        return pages_L

    def owns(self, page: int, tag: int) -> bool:
        """Yes."""
        return True

    def check(self, slots_R: I32, counts_R: I32, writes_R: I32, table_SL: I32) -> B1:
        """No rows."""
        return _NO_ROWS


class PageTags:
    """The tracker described above, for `pages` physical pages and `slots` requests of at most `max_pages` pages.

    checks  page comparisons made so far
    """

    def __init__(
        self, pages: int, page_size: int, slots: int, max_pages: int, *, seed: int = 0, bits: int = 63
    ) -> None:
        if not 1 <= bits <= 63:
            raise QuantkitError("an allocation counter has no such width", value=bits, allowed="1 to 63 bits")
        self.page_size = page_size
        self.tag_P: U64 = np.zeros(pages, np.uint64)
        self.generation_P: U64 = np.zeros(pages, np.uint64)
        self.granted_SL: I32 = np.full((slots, max_pages), -1, np.int32)
        self.expected_SL: U64 = np.zeros((slots, max_pages), np.uint64)
        self.suspect_S: B1 = np.zeros(slots, np.bool_)
        self.checks = 0
        self._seed = np.uint64(loops.mix(np.uint64(seed)))  # Numba returns a Python int
        self._lives = np.uint64((1 << bits) - 1)

    @property
    def sidecar_bytes(self) -> int:
        """Bytes of tags and generations: 16 a page."""
        return int(self.tag_P.nbytes + self.generation_P.nbytes)

    def exhaust(self, pages_N: I32) -> None:
        """For tests: the pages are in the last life that their counters allow."""
        self.generation_P[pages_N] = self._lives << np.uint64(1)

    def grant(self, slots_N: I32, positions_N: I32, pages_N: I32) -> None:
        """Stamp new tags and note them. A request whose copy on write read a wrong page becomes suspect."""
        loops.stamp(
            slots_N, positions_N, pages_N, self._seed,
            self.tag_P, self.generation_P, self.granted_SL, self.expected_SL, self.suspect_S,
        )  # fmt: skip

    def share(self, slot: int, tokens_T: I32, pages_L: I32, words_L: U64) -> int:
        """Note the hit as it is, for giving it back, and suspect the request unless every page is the one filed."""
        n = len(pages_L)
        keys_L = loops.prefix_keys(tokens_T, self.page_size, self._seed)[:n]
        genuine_L = (words_L ^ keys_L == self.tag_P[pages_L]) & (self.tag_P[pages_L] != 0)
        self.granted_SL[slot, :n] = pages_L
        self.expected_SL[slot, :n] = self.tag_P[pages_L]
        leading = n if genuine_L.all() else int(np.argmin(genuine_L))
        self.suspect_S[slot] |= leading < n
        return leading

    def file(self, slot: int, tokens_T: I32, pages_L: I32) -> tuple[U64, U64]:
        """Freeze the pages. The tag is the tree's own right to its reference, the masked tag is for hits."""
        keys_L = loops.prefix_keys(tokens_T, self.page_size, self._seed)
        first = len(keys_L) - len(pages_L)
        tags_L = self.expected_SL[slot, first : len(keys_L)].copy()
        self.generation_P[pages_L] |= np.uint64(1)
        return tags_L, tags_L ^ keys_L[first:]

    def free(self, pages_N: I32) -> I32:
        """Tag 0 is nobody's: a page that was freed too early is seen before anybody else gets it."""
        self.tag_P[pages_N] = 0
        usable_N: I32 = pages_N[self.generation_P[pages_N] >> np.uint64(1) < self._lives]
        return usable_N

    def held(self, slot: int, pages_L: I32) -> I32:
        """From the ledger: the block table may be what is wrong. What is in another life belongs to somebody else."""
        granted_L, expected_L = self.granted_SL[slot], self.expected_SL[slot]
        mine_L: I32 = granted_L[(granted_L >= 0) & (expected_L != 0) & (self.tag_P[granted_L] == expected_L)]
        self.granted_SL[slot], self.expected_SL[slot], self.suspect_S[slot] = -1, 0, False
        return mine_L

    def owns(self, page: int, tag: int) -> bool:
        """Whether the tag is the current one."""
        return tag != 0 and int(self.tag_P[page]) == tag

    def check(self, slots_R: I32, counts_R: I32, writes_R: I32, table_SL: I32) -> B1:
        """Compare every page of every row with the ledger, and look for frozen pages among those to be written."""
        bad_R: B1 = np.empty(len(slots_R), np.bool_)
        state = (self.tag_P, self.generation_P, self.expected_SL, self.suspect_S)
        self.checks += loops.check_rows(slots_R, counts_R, writes_R, table_SL, *state, bad_R)
        return bad_R


class ContentSeals:
    """Optional: a 64-bit hash of the bytes of frozen pages, taken when they are filed and compared on demand.

    Sees what tags cannot: wrong bytes in the right page. Costs 8 bytes a page and one pass over the bytes at each look,
    so it is made for sampling, at idle times, or in a test.
    """

    def __init__(self, cache: KVCache) -> None:
        parts = (cache.k, cache.v, cache.k_block_scale, cache.v_block_scale)
        self._words = [_words(p) for p in parts if p is not None]
        self.hash_P: U64 = np.zeros(len(cache.k), np.uint64)

    def seal(self, pages_N: I32) -> None:
        """Take the hashes of these pages as they are now."""
        self.hash_P[pages_N] = self._hash(pages_N)

    def verify(self, pages_N: I32) -> I32:
        """Those of the pages whose bytes are not what was sealed; all must have been sealed since they were granted."""
        wrong_N: I32 = pages_N[self._hash(pages_N) != self.hash_P[pages_N]]
        return wrong_N

    def _hash(self, pages_N: I32) -> U64:
        hash_N = np.zeros(len(pages_N), np.uint64)
        for words_PW in self._words:
            loops.hash_words(words_PW, pages_N.astype(np.int64), hash_N)
        return hash_N


def _words(array: Any) -> U64:
    """A page a row, as 64-bit words; a view, so the arrays of the cache must be contiguous."""
    rows = array.reshape(len(array), -1).view(np.uint8)
    if rows.shape[1] % 8:
        raise QuantkitError("a page has no whole number of 64-bit words", value=rows.shape[1], allowed="8 n bytes")
    words: U64 = rows.view(np.uint64)
    return words

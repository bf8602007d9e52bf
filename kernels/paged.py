"""The paged KV cache's bookkeeping: a pool of pages, a block table for each request, shared prefixes, eviction.

Attention as in PagedAttention (Kwon et al., 2023): a request maps its logical pages to physical ones anywhere in the
cache, so memory is handed out a page at a time and equal prefixes are stored once.

- A page is held by the requests whose block tables name it and by the prefix tree; it is free at zero references.
- A request is admitted only if its worst case (prompt and all tokens it may generate) fits into what is free, evictable
  and not promised to others. So nothing that runs is ever preempted, and what does not fit waits.
- A page filed in the tree is frozen until it is freed. A hit may end inside a page: the request copies that page before
  it writes the first token of its own (copy on write). At least one prompt token is left to compute.
- When pages run short, the longest unused prefix that nobody holds is evicted, leaf first.
- A tracker (`tags.py`) is told of every event and asked before anything is given back. The pool trusts its own tables;
  it is the tracker that does not.

The bytes of the cache are not touched here; `extend` says which pages to copy. Not safe for threads.

Shape suffixes: P physical pages, L logical pages of a request, S request slots, N requests of a call, T tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import KVCache, LatentCache
from quantkit.kernels.prefix import Node, PrefixTree
from quantkit.kernels.tags import NullTracker, Tracker

B1 = NDArray[np.bool_]
I32 = NDArray[np.int32]

_NONE: I32 = np.zeros(0, np.int32)


class PagePool:
    """`pages` pages of `page_size` tokens for at most `slots` requests of at most `max_pages` pages each.

    table_SL   int32: physical page of each logical page; count_S entries of a row are in use
    length_S   int32: tokens that have a place
    refs_P     int32: holders of a page
    frozen_P   bool: filed in the tree at some time of this life, so never written again
    free       pages to hand out, the next one last
    promised_S int32: pages that a request may still ask for
    retired    pages that the tracker has taken out of use
    """

    def __init__(self, pages: int, page_size: int, slots: int, max_pages: int, tracker: Tracker | None = None) -> None:
        if min(pages, page_size, slots, max_pages) < 1:
            raise QuantkitError("a page pool needs pages, tokens, slots", value=[pages, page_size, slots, max_pages])
        self.pages, self.page_size, self.max_pages = pages, page_size, max_pages
        self.tracker: Tracker = NullTracker() if tracker is None else tracker
        self.table_SL: I32 = np.zeros((slots, max_pages), np.int32)
        self.count_S: I32 = np.zeros(slots, np.int32)
        self.length_S: I32 = np.zeros(slots, np.int32)
        self.promised_S: I32 = np.zeros(slots, np.int32)
        self.refs_P: I32 = np.zeros(pages, np.int32)
        self.frozen_P: B1 = np.zeros(pages, np.bool_)
        self.free: list[int] = list(range(pages - 1, -1, -1))
        self.open_slots: list[int] = list(range(slots - 1, -1, -1))
        self.tree = PrefixTree(page_size)
        self.retired = 0

    @property
    def available(self) -> int:
        """Pages that a new request could still be promised."""
        return len(self.free) + len(self.tree.evictable) - int(self.promised_S.sum())

    def open(self, tokens_T: I32, limit: int) -> tuple[int, int] | None:
        """Admit a request with this prompt that will never hold more than `limit` tokens.

        Returns its slot and how many of its tokens are in the cache already; None if it has to wait.
        """
        pages = -(-limit // self.page_size)
        if not 0 < len(tokens_T) <= limit or pages > min(self.max_pages, self.pages - self.retired):
            allowed = f"1 to {min(self.max_pages, self.pages - self.retired) * self.page_size} tokens, prompt included"
            raise QuantkitError("the request can never be admitted", value=[len(tokens_T), limit], allowed=allowed)
        path, found = self.tree.match(tokens_T[:-1])
        need = pages - found // self.page_size
        pinned = sum(node.page in self.tree.evictable for node in path)
        if not self.open_slots or need + pinned > self.available:
            return None
        slot = self.open_slots.pop()
        self.count_S[slot], self.length_S[slot], self.promised_S[slot] = len(path), found, need
        if path:
            self._share(slot, tokens_T, path)
        return slot, found

    def extend(self, slots_N: I32, lengths_N: I32) -> tuple[I32, I32]:
        """Give each request a place for its tokens up to `lengths_N`; returns pages to copy, sources and targets.

        The copies must be made before anything else is written. Raises if a request asks for more than it was promised.
        """
        size, counts_N = self.page_size, self.count_S[slots_N]
        first_N = self.length_S[slots_N] // size  # the page of the next token
        old_N = self.table_SL[slots_N, np.minimum(first_N, self.max_pages - 1)]
        copied_N = (first_N < counts_N) & self.frozen_P[old_N]
        fresh_N = np.maximum(-(-lengths_N // size) - counts_N, 0)
        need_N = fresh_N + copied_N
        if (need_N > self.promised_S[slots_N]).any():
            n = int(np.argmax(need_N > self.promised_S[slots_N]))
            raise QuantkitError("a request asks for more pages than it was promised", value=int(need_N[n]),
                                allowed=int(self.promised_S[slots_N[n]]))  # fmt: skip
        self.length_S[slots_N] = lengths_N
        if not need_N.any():
            return _NONE, _NONE
        within = np.arange(fresh_N.sum(), dtype=np.int32) - np.repeat(np.cumsum(fresh_N) - fresh_N, fresh_N)
        slots = np.concatenate((slots_N[copied_N], np.repeat(slots_N, fresh_N)))
        positions = np.concatenate((first_N[copied_N], np.repeat(counts_N, fresh_N) + within)).astype(np.int32)
        pages = self.take(len(slots))
        self.tracker.grant(slots, positions, pages)
        self.table_SL[slots, positions] = pages
        self.count_S[slots_N] += fresh_N
        self.promised_S[slots_N] -= need_N.astype(np.int32)
        sources = old_N[copied_N]
        for n in range(len(sources)):  # one by one: two requests may copy the same page
            self.give(sources[n : n + 1])
        return sources, pages[: len(sources)]

    def file(self, slot: int, tokens_T: I32) -> I32:
        """Put the full pages of these tokens, the first of the request, into the prefix tree; returns the new ones.

        Only pages that were granted to the request itself, and only below a path that it holds: if another request has
        filed the same tokens in the meantime, its pages stay and these do not enter.
        """
        text, width = tokens_T.tobytes(), 4 * self.page_size
        row_L = self.table_SL[slot, : min(len(tokens_T) // self.page_size, int(self.count_S[slot]))]
        keys = [text[at : at + width] for at in range(0, len(row_L) * width, width)]
        node, depth = self.tree.root, 0
        while depth < len(keys) and (child := node.children.get(keys[depth])) and child.page == row_L[depth]:
            node, depth = child, depth + 1
        pages_L = row_L[depth:].copy()
        if not len(pages_L) or keys[depth] in node.children or self.frozen_P[pages_L].any():
            return _NONE
        tags_L, words_L = self.tracker.file(slot, tokens_T[: len(row_L) * self.page_size], pages_L)
        self.frozen_P[pages_L] = True
        self.refs_P[pages_L] += 1
        for key, page, tag, word in zip(keys[depth:], pages_L.tolist(), tags_L.tolist(), words_L.tolist(), strict=True):
            node = self.tree.add(node, page, key, tag, word)
        return pages_L

    def close(self, slot: int) -> None:
        """The request is over: give back what it rightly holds."""
        row_L = self.table_SL[slot, : self.count_S[slot]]
        self.give(self.tracker.held(slot, row_L)[::-1])  # leaf first
        self.count_S[slot] = self.length_S[slot] = self.promised_S[slot] = 0
        self.open_slots.append(slot)

    def abort(self, slot: int) -> None:
        """As `close`, and take filed pages that are not what was filed out of the tree, with all below them."""
        for page in self.table_SL[slot, : self.count_S[slot]].tolist():
            node = self.tree.by_page.get(page)
            if node is not None and not self.tracker.owns(page, node.tag):
                self.drop(node)
        self.close(slot)

    def take(self, n: int) -> I32:
        """The next `n` free pages, each with one reference; evicts for them if need be."""
        while len(self.free) < n and self.tree.evictable:
            self.drop(self.tree.by_page[next(iter(self.tree.evictable))])
        if len(self.free) < n:
            raise QuantkitError("the page pool is exhausted", value=n, allowed=len(self.free))
        pages_N = np.array(self.free[len(self.free) - n :][::-1], np.int32)
        del self.free[len(self.free) - n :]
        self.refs_P[pages_N] = 1
        self.frozen_P[pages_N] = False
        return pages_N

    def give(self, pages_N: I32) -> None:
        """Drop one reference to each page (none twice); free it at none, let it be evicted if only the tree is left."""
        self.refs_P[pages_N] -= 1
        left_N = self.refs_P[pages_N]
        if (left_N < 0).any():
            raise QuantkitError("a page was given back more often than taken", value=int(pages_N[np.argmin(left_N)]))
        free_N = self.tracker.free(pages_N[left_N == 0])
        self.retired += int((left_N == 0).sum()) - len(free_N)
        self.free.extend(free_N.tolist())
        self.tree.evictable.update((p, None) for p in pages_N[left_N == 1].tolist() if p in self.tree.by_page)

    def drop(self, node: Node) -> None:
        """Take a node of the tree and all below it away, and give back the references that the tree rightly holds."""
        gone = self.tree.detach(node)
        self.give(np.array([n.page for n in reversed(gone) if self.tracker.owns(n.page, n.tag)], np.int32))

    def _share(self, slot: int, tokens_T: I32, path: list[Node]) -> None:
        """Map a prefix hit. A page that is not what was filed leaves the tree; the request is the tracker's to stop."""
        pages_L = np.array([node.page for node in path], np.int32)
        words_L = np.array([node.word for node in path], np.uint64)
        last_T = np.frombuffer(path[-1].tokens, np.int32)  # all of it, where the hit ends inside
        tokens_T = np.concatenate((tokens_T[: (len(path) - 1) * self.page_size], last_T))
        genuine = self.tracker.share(slot, tokens_T, pages_L, words_L)
        self.table_SL[slot, : len(path)] = pages_L
        self.refs_P[pages_L] += 1
        for page in pages_L.tolist():
            self.tree.evictable.pop(page, None)
        if genuine < len(path):
            self.drop(path[genuine])


def copy_pages(cache: KVCache | LatentCache, sources_N: I32, targets_N: I32) -> None:
    """Copy whole pages within the cache (numpy), as `PagePool.extend` asks for."""
    parts = [cache.rows] if isinstance(cache, LatentCache) else [
        cache.k, cache.v, cache.k_block_scale, cache.v_block_scale
    ]  # fmt: skip
    for part in parts:
        if isinstance(part, np.ndarray):
            part[targets_N] = part[sources_N]

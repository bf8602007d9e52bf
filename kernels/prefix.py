"""The prefix tree: which pages of the cache hold which tokens, so that equal beginnings are stored and computed once.

One node is one full page of tokens, filed under its parent by those tokens (compared in full; nothing is found by hash
alone). The tree holds one reference to each of its pages. A page that nobody else holds is *evictable*; the longest
unused goes first. Requests hold whole paths from the root, and a path is let go leaf first, so an evictable node never
lies above one in use, and the first in the queue is always a leaf.

Shape suffixes: T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Node:
    """A page of tokens: `tag` is the page's when it was filed, `word` the same masked with the key of its tokens."""

    page: int
    tokens: bytes
    tag: int
    word: int
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)


class PrefixTree:
    """Nodes by tokens and by page, and the queue of those that may be evicted, the longest unused first."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node(-1, b"", 0, 0, None)
        self.by_page: dict[int, Node] = {}
        self.evictable: dict[int, None] = {}

    def match(self, tokens_T: I32) -> tuple[list[Node], int]:
        """The longest path that agrees with the tokens, and how many tokens that is.

        Its last node may agree in part: then the count is no whole number of pages.
        """
        text, width = tokens_T.tobytes(), 4 * self.page_size
        path, node = [], self.root
        for at in range(0, len(text) - width + 1, width):
            child = node.children.get(text[at : at + width])
            if child is None:
                break
            path.append(child)
            node = child
        matched = len(path) * self.page_size
        best, part = None, 0
        for child in node.children.values():
            n = _common(child.tokens, tokens_T[matched:])
            if n > part:
                best, part = child, n
        return (path if best is None else [*path, best]), matched + part

    def add(self, parent: Node, page: int, tokens: bytes, tag: int, word: int) -> Node:
        """File a page under its parent."""
        node = Node(page, tokens, tag, word, parent)
        parent.children[tokens] = node
        self.by_page[page] = node
        return node

    def detach(self, node: Node) -> list[Node]:
        """Take a node and all below it out of the tree; returns them, leaves last."""
        if node.parent is not None:
            siblings = node.parent.children
            for tokens in [t for t, child in siblings.items() if child is node]:
                del siblings[tokens]
            node.parent = None
        gone = [node]
        for below in gone:  # grows while it is walked
            gone.extend(below.children.values())
        for below in gone:
            below.children = {}
            if self.by_page.get(below.page) is below:
                del self.by_page[below.page]
                self.evictable.pop(below.page, None)
        return gone


def _common(tokens: bytes, other_T: I32) -> int:
    """Length of the common beginning, in tokens."""
    n = min(len(tokens) // 4, len(other_T))
    same = np.frombuffer(tokens, np.int32, n) == other_T[:n]
    return n if same.all() else int(np.argmin(same))

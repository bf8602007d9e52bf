"""A slow model of a paged cache with shared prefixes: what must be true after every operation, from first principles.

It keeps each request as the list of its tokens and nothing else. From the block tables and the nodes of the prefix tree
it derives anew who holds which page, which pages are free, what may be evicted, what has been promised, and what a
prompt can find in the cache. Plain Python, no code of the product.
"""

from dataclasses import dataclass


@dataclass
class Holder:
    """One running request: its tokens so far, the most it may hold, and whether it still shares a page it must copy."""

    tokens: list
    limit: int
    found: int
    copied: bool = False


def pages_of(tokens: int, size: int) -> int:
    return (tokens + size - 1) // size


def common_prefix(a, b) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def expected_hit(prompt, filed) -> int:
    """Tokens that a prompt finds: the longest beginning of it, its last token apart, that some filed path begins with."""
    return max((common_prefix(prompt[:-1], path) for path in filed), default=0)


def references(rows, filed_pages) -> dict:
    """page -> number of holders, from the block tables and the pages of the tree."""
    count: dict = {}
    for row in rows:
        for page in row:
            count[page] = count.get(page, 0) + 1
    for page in filed_pages:
        count[page] = count.get(page, 0) + 1
    return count


def still_to_take(holder: Holder, mapped: int, size: int) -> int:
    """Pages that a request may ask for until it has its limit of tokens."""
    pending_copy = holder.found % size != 0 and not holder.copied
    return pages_of(holder.limit, size) - mapped + pending_copy


def room(pages: int, rows, filed_pages, promised: int) -> int:
    """Pages that nobody needs: all but those in block tables and those promised. Filed ones can be evicted."""
    return pages - len({p for row in rows for p in row}) - promised


def needed(prompt, limit: int, filed, rows, size: int) -> int:
    """Pages that admitting this prompt takes out of `room`: new ones, and filed ones that it would pin."""
    hit = expected_hit(prompt, filed)
    best = next((path for path in filed if common_prefix(prompt[:-1], path) >= hit), ())
    held = {p for row in rows for p in row}
    shared = filed.get(tuple(best), [])[: pages_of(hit, size)]
    return pages_of(limit, size) - hit // size + sum(p not in held for p in shared)

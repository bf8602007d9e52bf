"""The mistakes that a server of shared caches can make, made on purpose in the live structures of a replay.

Each function looks for an occasion and returns what it touched, or None if this step offers none. They reach into the
pool behind the tracker's back, except where the real mistake would not either: a page handed out twice is handed out
by the allocator in the usual way. Without a tracker each of them can end in wrong tokens or in another request's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from quantkit.kernels.replay import Fault, Injected, Replay
from quantkit.kernels.tags import PageTags


def _private(replay: Replay, rng: np.random.Generator) -> tuple[int, int] | None:
    """A running request and the logical number of a page of its own that is full and not filed."""
    pool = replay.pool
    for slot in rng.permutation(replay.running).tolist():
        row = pool.table_SL[slot, : pool.length_S[slot] // pool.page_size]
        own = np.flatnonzero((pool.refs_P[row] == 1) & ~pool.frozen_P[row])
        if len(own):
            return slot, int(rng.choice(own))
    return None


def _record(name: str, replay: Replay, *pages: int) -> Injected:
    return Injected(name, replay.steps, frozenset(pages))


def double_allocation(replay: Replay, rng: np.random.Generator) -> Injected | None:
    """A page in use is on the free list: whoever needs the next page, in this step, gets it."""
    pool, found = replay.pool, _private(replay, rng)
    running = np.array(replay.running, np.int32)
    needed = (replay.known_S[running] > pool.count_S[running] * pool.page_size).any()
    if found is None or not needed:
        return None
    page = int(pool.table_SL[found])
    pool.free.append(page)
    return _record("double allocation", replay, page)


def free_too_early(replay: Replay, rng: np.random.Generator) -> Injected | None:
    """A page is given back while its request still reads it."""
    found = _private(replay, rng)
    if found is None:
        return None
    page = int(replay.pool.table_SL[found])
    replay.pool.give(np.array([page], np.int32))
    return _record("free too early", replay, page)


def stale_block_table(replay: Replay, rng: np.random.Generator) -> Injected | None:
    """An entry still names a page of an earlier request: one that was used, given back, and may soon be used again."""
    pool, found = replay.pool, _private(replay, rng)
    used = [p for p in pool.free if pool.refs_P[p] == 0 and replay.cache.k[p].any()]
    if found is None or not used:
        return None
    page = used[int(rng.integers(len(used)))]
    pool.table_SL[found] = page
    return _record("stale block table", replay, page)


def swapped_pages(replay: Replay, rng: np.random.Generator) -> Injected | None:
    """Two requests have each other's page. (Within one request attention would not notice: keys carry positions.)"""
    pool, one, two = replay.pool, _private(replay, rng), _private(replay, rng)
    if one is None or two is None or one[0] == two[0]:
        return None
    a, b = int(pool.table_SL[one]), int(pool.table_SL[two])
    pool.table_SL[one], pool.table_SL[two] = b, a
    return _record("swapped pages", replay, a, b)


def lost_copy_on_write(replay: Replay, rng: np.random.Generator) -> Injected | None:
    """A request whose prefix hit ends inside a page writes there, though another request is reading that page."""
    pool = replay.pool
    for slot in rng.permutation(replay.running).tolist():
        length = int(pool.length_S[slot])
        page = int(pool.table_SL[slot, length // pool.page_size])
        if length % pool.page_size and pool.frozen_P[page] and pool.refs_P[page] > 2:  # the tree, this one, another
            pool.frozen_P[page] = False
            record = _record("lost copy on write", replay, page)
            record.undo = partial(pool.frozen_P.__setitem__, page, True)
            return record
    return None


def wrong_prefix_hit(replay: Replay, rng: np.random.Generator) -> Injected | None:
    """The prefix tree names the page of other tokens for a prefix that the next request in the queue begins with."""
    pool = replay.pool
    if not replay.queue:
        return None
    prompt = replay.requests[replay.queue[0]].prompt_T
    path, found = pool.tree.match(prompt[:-1])
    path = path[: found // pool.page_size]
    others = [n.page for n in pool.tree.by_page.values() if n not in path]
    if not path or not others:
        return None
    node, page = path[int(rng.integers(len(path)))], others[int(rng.integers(len(others)))]
    pool.tree.by_page.pop(node.page, None)
    pool.tree.evictable.pop(node.page, None)
    node.page = page
    return _record("wrong prefix hit", replay, page)


def page_reused_between_checks(replay: Replay, rng: np.random.Generator) -> Injected | None:
    """After the check: a page is given back, handed to another request and overwritten before the kernel reads it."""
    pool, found = replay.pool, _private(replay, rng)
    takers = [s for s in replay.running if pool.promised_S[s] > 0 and (found is None or s != found[0])]
    if found is None or not takers:
        return None
    page = int(pool.table_SL[found])
    taker = np.array([takers[int(rng.integers(len(takers)))]], np.int32)
    length = pool.length_S[taker]
    pool.give(np.array([page], np.int32))
    pool.extend(taker, pool.count_S[taker] * pool.page_size + 1)
    pool.length_S[taker] = length
    junk: Any = rng.integers(0, 50, replay.cache.k[page].shape)  # small finite codes of every format
    replay.cache.k[page], replay.cache.v[page] = junk, junk
    return _record("page reused between checks", replay, page)


def tag_wrap_around(replay: Replay, rng: np.random.Generator) -> Injected | None:
    """A page is freed too early at the end of its allocation counter: one more life and an old tag would be valid."""
    tags, found = replay.pool.tracker, _private(replay, rng)
    if found is None:
        return None
    page = replay.pool.table_SL[found].reshape(1)
    if isinstance(tags, PageTags):
        tags.exhaust(page)
    replay.pool.give(page)
    return _record("tag wrap-around", replay, int(page[0]))


FAULTS = {
    "double allocation": double_allocation,
    "free too early": free_too_early,
    "stale block table": stale_block_table,
    "swapped pages": swapped_pages,
    "lost copy on write": lost_copy_on_write,
    "wrong prefix hit": wrong_prefix_hit,
    "page reused between checks": page_reused_between_checks,
    "tag wrap-around": tag_wrap_around,
}


def fault(name: str, step: int) -> Fault:
    """The named fault, at the first occasion from `step` on."""
    return Fault(step, "after check" if name == "page reused between checks" else "before check", FAULTS[name])

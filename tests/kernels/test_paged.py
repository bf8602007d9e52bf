"""The page pool against a slow model: random histories of requests, with what every request reads through its table.

pytest tests/kernels/test_paged.py
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import paged as model
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import new_cache, new_latent_cache
from quantkit.kernels.paged import PagePool, copy_pages
from quantkit.kernels.tags import PageTags

PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def ints(*values):
    return np.array(values, np.int32)


def nodes(pool):
    """(tokens from the root, pages from the root) of every node of the prefix tree."""
    todo = [(pool.tree.root, (), [])]
    while todo:
        node, tokens, pages = todo.pop()
        for child in node.children.values():
            path = (*tokens, *np.frombuffer(child.tokens, np.int32).tolist()), [*pages, child.page]
            yield path
            todo.append((child, *path))


class PoolMachine(RuleBasedStateMachine):
    """Requests come, grow, are filed and leave; `memory` stands for the cache and holds one token a slot."""

    @initialize(size=st.integers(1, 4), pages=st.integers(6, 16), slots=st.integers(1, 5))
    def build(self, size, pages, slots):
        self.size, self.pages = size, pages
        self.tags = PageTags(pages, size, slots, pages)
        self.pool = PagePool(pages, size, slots, pages, self.tags)
        self.memory = np.full((pages, size), -1)
        self.slots = slots
        self.running = {}

    def rows(self):
        return [self.pool.table_SL[s, : self.pool.count_S[s]].tolist() for s in self.running]

    def filed(self):
        return dict(nodes(self.pool))

    def filed_pages(self):
        return [pages[-1] for pages in self.filed().values()]

    def promised(self):
        return sum(model.still_to_take(r, int(self.pool.count_S[s]), self.size) for s, r in self.running.items())

    @rule(prompt=PROMPT, more=st.integers(0, 8))
    def open(self, prompt, more):
        limit = len(prompt) + more
        if model.pages_of(limit, self.size) > self.pages:
            with pytest.raises(QuantkitError, match="never be admitted"):
                self.pool.open(ints(*prompt), limit)
            return
        filed = self.filed()
        space = model.room(self.pages, self.rows(), self.filed_pages(), self.promised())
        fits = len(self.running) < self.slots
        fits = fits and model.needed(prompt, limit, filed, self.rows(), self.size) <= space
        opened = self.pool.open(ints(*prompt), limit)
        assert (opened is not None) == fits
        if opened is None:
            return
        slot, found = opened
        assert found == model.expected_hit(prompt, filed)
        self.running[slot] = model.Holder(prompt[:found], limit, found)
        self.grow(slot, prompt[found:])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def extend(self, data, tokens):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running[slot]
        self.grow(slot, tokens[: request.limit - len(request.tokens)])

    def grow(self, slot, tokens):
        """Find places, copy, check, write: what a step of a server does."""
        request, old = self.running[slot], len(self.running[slot].tokens)
        if not tokens:
            return
        request.tokens = [*request.tokens, *tokens]
        sources, targets = self.pool.extend(ints(slot), ints(len(request.tokens)))
        request.copied = True
        self.memory[targets] = self.memory[sources]
        self.check([slot], [old // self.size])
        for i in range(old, len(request.tokens)):
            self.memory[self.pool.table_SL[slot, i // self.size], i % self.size] = request.tokens[i]

    def check(self, slots, writes):
        rows = ints(*slots)
        assert not self.tags.check(rows, self.pool.count_S[rows], ints(*writes), self.pool.table_SL).any()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def file(self, data):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        before = self.filed()
        new = self.pool.file(slot, ints(*self.running[slot].tokens)).tolist()
        assert set(self.filed()) >= set(before)
        assert sorted(new) == sorted(set(self.filed_pages()) - {pages[-1] for pages in before.values()})

    @precondition(lambda self: self.running)
    @rule(data=st.data(), abort=st.booleans())
    def leave(self, data, abort):
        slot = data.draw(st.sampled_from(sorted(self.running)))
        before = self.filed()
        (self.pool.abort if abort else self.pool.close)(slot)
        del self.running[slot]
        assert self.filed() == before

    @invariant()
    def every_request_reads_its_own_tokens(self):
        for slot, request in self.running.items():
            read = self.memory[self.pool.table_SL[slot, : self.pool.count_S[slot]]].ravel()[: len(request.tokens)]
            assert read.tolist() == request.tokens

    @invariant()
    def the_tree_holds_what_it_says(self):
        for tokens, pages in self.filed().items():
            assert self.memory[pages].ravel().tolist() == list(tokens)

    @invariant()
    def references_are_holders(self):
        held = model.references(self.rows(), self.filed_pages())
        assert {p: n for p, n in enumerate(self.pool.refs_P.tolist()) if n} == held
        assert sorted(self.pool.free) == sorted(set(range(self.pages)) - set(held))
        mapped = {p for row in self.rows() for p in row}
        assert set(self.pool.tree.evictable) == set(self.filed_pages()) - mapped

    @invariant()
    def promises_can_be_kept(self):
        assert int(self.pool.promised_S.sum()) == self.promised()
        assert self.pool.available == model.room(self.pages, self.rows(), self.filed_pages(), self.promised()) >= 0

    @invariant()
    def tags_agree(self):
        counts = [int(self.pool.count_S[s]) for s in self.running]
        self.check(list(self.running), counts)
        assert ((self.tags.tag_P != 0) == (self.pool.refs_P > 0)).all()
        frozen = (self.tags.generation_P & np.uint64(1)).astype(bool) & (self.pool.refs_P > 0)
        assert (frozen == self.pool.frozen_P & (self.pool.refs_P > 0)).all()


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPool = PoolMachine.TestCase


def served(pool, tokens, more=0):
    """A request with these tokens in the cache, filed."""
    slot, _ = pool.open(ints(*tokens), len(tokens) + more)
    pool.extend(ints(slot), ints(len(tokens)))
    pool.file(slot, ints(*tokens))
    return slot


def test_two_requests_that_copy_one_page_in_one_step_both_let_it_go():
    pool = PagePool(8, 4, 3, 4)
    pool.close(served(pool, [1, 2, 3, 4, 5, 6, 7, 8]))
    a, found = pool.open(ints(1, 2, 3, 4, 5, 6, 0, 0), 8)
    b, _ = pool.open(ints(1, 2, 3, 4, 5, 6, 9, 9), 8)
    assert found == 6
    shared = pool.table_SL[a, 1]
    assert pool.refs_P[shared] == 3
    sources, targets = pool.extend(ints(a, b), ints(8, 8))
    assert sources.tolist() == [shared] * 2
    assert targets.tolist() == pool.table_SL[[a, b], 1].tolist()
    assert len({shared, *targets.tolist()}) == 3
    assert pool.refs_P[shared] == 1


def test_the_longest_unused_prefix_is_evicted_leaf_first_and_never_one_in_use():
    pool = PagePool(6, 2, 3, 6)
    pool.close(served(pool, [1, 1, 1, 2]))
    pool.close(served(pool, [3, 3, 3, 4]))
    using, found = pool.open(ints(1, 1, 1, 2, 5), 5)  # makes the first one the last used, and holds it
    assert found == 4
    pool.extend(ints(using), ints(5))
    slot, _ = pool.open(ints(7, 7), 4)
    pool.extend(ints(slot), ints(4))
    assert sorted(t for t, _ in nodes(pool)) == [(1, 1), (1, 1, 1, 2), (3, 3)]
    assert pool.available == 1
    assert pool.open(ints(8, 8, 8), 3) is None  # two pages: one is evictable, the others are in use
    pool.close(using)
    slot, _ = pool.open(ints(8, 8, 8), 6)
    pool.extend(ints(slot), ints(6))
    assert sorted(t for t, _ in nodes(pool)) == [(1, 1)]


def test_what_another_request_filed_first_stays_and_nothing_is_filed_twice():
    pool = PagePool(8, 2, 2, 4)
    a, _ = pool.open(ints(1, 2, 3, 4), 4)
    b, _ = pool.open(ints(1, 2, 5, 6), 4)
    pool.extend(ints(a, b), ints(4, 4))
    assert pool.file(a, ints(1, 2, 3, 4)).tolist() == pool.table_SL[a, :2].tolist()
    assert not len(pool.file(a, ints(1, 2, 3, 4)))
    assert not len(pool.file(b, ints(1, 2, 5, 6)))  # its first page is not the tree's
    pool.close(b)
    assert pool.available == 6


def test_a_dropped_path_is_not_filed_again_by_those_who_still_hold_it():
    pool = PagePool(8, 2, 2, 4)
    a = served(pool, [1, 2, 3, 4], more=2)
    pool.drop(pool.tree.by_page[int(pool.table_SL[a, 0])])
    assert not pool.tree.by_page
    assert not len(pool.file(a, ints(1, 2, 3, 4)))
    pool.close(a)
    assert sorted(pool.free) == list(range(8))


def test_more_than_was_promised_is_refused():
    pool = PagePool(8, 2, 2, 4)
    slot, _ = pool.open(ints(1, 2, 3), 4)
    with pytest.raises(QuantkitError, match="more pages than it was promised"):
        pool.extend(ints(slot), ints(5))


def test_a_page_given_back_twice_is_an_error():
    pool = PagePool(4, 2, 1, 2)
    page = pool.take(1)
    pool.give(page)
    with pytest.raises(QuantkitError, match="given back more often"):
        pool.give(page)


def test_taking_more_than_there_is_is_an_error_and_takes_nothing():
    pool = PagePool(4, 2, 1, 2)
    with pytest.raises(QuantkitError, match="exhausted"):
        pool.take(5)
    assert len(pool.take(4)) == 4


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_a_pool_of_nothing_is_refused(sizes):
    with pytest.raises(QuantkitError, match="needs pages"):
        PagePool(*sizes)


def test_pages_are_copied_with_their_scales():
    caches = [new_cache(f, 4, 2, 1, 32) for f in ("bf16", "e4m3", "nvfp4", "mxfp4")] + [new_latent_cache("dsa", 4, 2)]
    rng = np.random.default_rng(0)
    for cache in caches:
        names = ("rows",) if hasattr(cache, "rows") else ("k", "v", "k_block_scale", "v_block_scale")
        parts = [p for p in (getattr(cache, n) for n in names) if p is not None]
        for part in parts:
            part[:] = rng.integers(0, 256, part.shape)
        before = [p.copy() for p in parts]
        copy_pages(cache, ints(0, 0), ints(2, 3))
        for part, old in zip(parts, before, strict=True):
            assert (part[[0, 1]] == old[[0, 1]]).all()
            assert (part[[2, 3]] == old[[0, 0]]).all()

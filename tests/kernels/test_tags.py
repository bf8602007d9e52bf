"""Page tags: what each kind of wrong bookkeeping looks like to the batch check, and that right bookkeeping never does.

pytest tests/kernels/test_tags.py
"""

import numpy as np
import pytest
from oracle import tags as plain
from quantkit.kernels.cpu import tags as loops
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.kv import new_cache
from quantkit.kernels.paged import PagePool
from quantkit.kernels.tags import ContentSeals, NullTracker, PageTags

PAGES, SIZE, SLOTS, LONGEST = 32, 4, 4, 8


def ints(*values):
    return np.array(values, np.int32)


def serve(pool, *lengths, seed=0):
    """Requests with random tokens of these lengths, all in the cache; returns their slots."""
    rng, slots = np.random.default_rng(seed), []
    for length in lengths:
        slot, _ = pool.open(rng.integers(0, 9, length).astype(np.int32), LONGEST * SIZE)
        slots.append(slot)
    pool.extend(ints(*slots), ints(*lengths))
    return slots


def bad_rows(pool, slots, writes=None):
    rows = ints(*slots)
    counts = pool.count_S[rows]
    bad = pool.tracker.check(rows, counts, counts if writes is None else ints(*writes), pool.table_SL)
    return rows[bad].tolist()


@pytest.fixture
def pool():
    return PagePool(PAGES, SIZE, SLOTS, LONGEST, PageTags(PAGES, SIZE, SLOTS, LONGEST, seed=11))


# ---- the numbers ----


def test_splitmix64_gives_the_published_numbers():
    golden = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    for n, value in enumerate(golden):  # state 0, then one increment further each time
        state = n * 0x9E3779B97F4A7C15 & plain.MASK
        assert int(loops.mix(np.uint64(state))) == plain.splitmix64(state) == value


def test_tags_keys_and_states_are_those_of_plain_integers(pool):
    tags = pool.tracker
    first, second = serve(pool, 9, 5)
    for slot in (first, second):
        for i, page in enumerate(pool.table_SL[slot, : pool.count_S[slot]].tolist()):
            assert int(tags.tag_P[page]) == int(tags.expected_SL[slot, i]) == plain.tag(11, i, page, 1)
    pool.close(first)
    (again,) = serve(pool, 9, seed=1)
    page = int(pool.table_SL[again, 2])
    assert int(tags.tag_P[page]) == plain.tag(11, 2, page, 2)
    tokens = np.random.default_rng(1).integers(0, 9, 9).astype(np.int32)
    keys = loops.prefix_keys(tokens, SIZE, np.uint64(plain.splitmix64(11)))
    assert keys.tolist() == [plain.prefix_key(11, tokens[:n].tolist()) for n in (4, 8)]
    node_page = int(pool.file(again, tokens)[1])
    node = pool.tree.by_page[node_page]
    assert node.word == int(tags.tag_P[node_page]) ^ int(keys[1])
    assert int(tags.generation_P[node_page]) % 2 == 1


def test_the_sidecar_is_16_bytes_a_page():
    for pages in (1, 1000, 18438):
        assert PageTags(pages, 64, 2, 4).sidecar_bytes == 16 * pages


# ---- right bookkeeping ----


def test_a_million_checks_of_a_busy_pool_raise_no_alarm():
    rng = np.random.default_rng(0)
    pages, size, slots, longest = 20000, 4, 96, 400
    tags = PageTags(pages, size, slots, longest)
    pool = PagePool(pages, size, slots, longest, tags)
    prefixes = rng.integers(0, 99, (5, 700)).astype(np.int32)
    texts = {}
    while tags.checks < 1_200_000:
        while len(texts) < slots:
            head = prefixes[rng.integers(5)][: rng.integers(1, 700)]
            text = np.concatenate((head, rng.integers(0, 99, rng.integers(1, 400)).astype(np.int32)))
            opened = pool.open(text, len(text) + 100)
            if opened is None:
                break
            texts[opened[0]] = text
        rows = ints(*texts)
        old = pool.length_S[rows]
        grow = np.minimum(rng.integers(0, 20, len(rows)), pool.promised_S[rows] * size)
        pool.extend(rows, np.maximum(old + grow, [len(texts[s]) for s in rows.tolist()]).astype(np.int32))
        assert not bad_rows(pool, rows, old // size)
        for slot in rng.permutation(rows)[:10].tolist():
            if rng.random() < 0.8:
                pool.file(slot, texts[slot])
            (pool.close if rng.random() < 0.9 else pool.abort)(slot)
            del texts[slot]
    assert tags.checks >= 1_000_000
    assert pool.retired == 0


def test_the_null_tracker_takes_the_same_decisions_and_checks_nothing():
    null, tagged = (PagePool(PAGES, SIZE, SLOTS, LONGEST, t) for t in (None, PageTags(PAGES, SIZE, SLOTS, LONGEST)))
    for pool in (null, tagged):
        one, two = serve(pool, 9, 17)
        pool.file(one, np.random.default_rng(0).integers(0, 9, 9).astype(np.int32))
        pool.close(one)
        serve(pool, 13)  # begins as the first one did
        pool.table_SL[two, 0] = 31
    assert isinstance(null.tracker, NullTracker)
    assert (null.table_SL == tagged.table_SL).all()
    assert null.free == tagged.free
    assert not len(null.tracker.check(ints(0), ints(3), ints(3), null.table_SL))
    assert bad_rows(tagged, [two]) == [two]


# ---- wrong bookkeeping ----


def swap(pool, a, b):
    pool.table_SL[a, [0, 1]] = pool.table_SL[a, [1, 0]]


def another_requests_page(pool, a, b):
    pool.table_SL[a, 1] = pool.table_SL[b, 1]


def a_free_page(pool, a, b):
    pool.table_SL[a, 1] = pool.free[0]


def a_page_below_the_cache(pool, a, b):
    pool.table_SL[a, 0] = -1


def a_page_beyond_the_cache(pool, a, b):
    pool.table_SL[a, 0] = PAGES


def given_back_too_early(pool, a, b):
    pool.give(pool.table_SL[a, :1])


def handed_out_twice(pool, a, b):
    pool.free.append(int(pool.table_SL[a, 1]))
    pool.extend(ints(b), pool.count_S[[b]] * SIZE + 1)


def reused_and_given_back_to_the_same_request(pool, a, b):
    pages = pool.table_SL[a, :1].copy()
    pool.give(pages)
    assert pool.take(1) == pages
    granted, expected = pool.tracker.granted_SL.copy(), pool.tracker.expected_SL.copy()
    pool.tracker.grant(ints(b), ints(0), pages)  # somebody wrote into it in the meantime
    pool.tracker.granted_SL[:], pool.tracker.expected_SL[:] = granted, expected


@pytest.mark.parametrize("fault", [
    swap, another_requests_page, a_free_page, a_page_below_the_cache, a_page_beyond_the_cache, given_back_too_early,
    handed_out_twice, reused_and_given_back_to_the_same_request,
])  # fmt: skip
def test_a_wrong_page_condemns_the_request_that_maps_it_and_no_other(pool, fault):
    slots = serve(pool, 10, 13, 7)
    assert bad_rows(pool, slots) == []
    fault(pool, slots[0], slots[1])
    assert bad_rows(pool, slots) == slots[:1]
    in_use = set(pool.table_SL[slots[1], : pool.count_S[slots[1]]].tolist())
    pool.abort(slots[0])
    assert bad_rows(pool, slots[1:]) == []
    assert not in_use & set(pool.free)
    pool.close(slots[1])
    pool.close(slots[2])
    assert len(pool.free) == len(set(pool.free))


def test_a_page_twice_in_one_allocation_condemns_the_request(pool):
    (slot,) = serve(pool, 4)
    pool.free[-2:] = [20, 20]
    pool.extend(ints(slot), ints(12))
    assert bad_rows(pool, [slot]) == [slot]


def test_writing_a_filed_page_is_a_lost_copy(pool):
    tokens = np.arange(8, dtype=np.int32)
    first, _ = pool.open(tokens, 12)
    pool.extend(ints(first), ints(8))
    pool.file(first, tokens)
    second, found = pool.open(ints(0, 1, 2, 3, 4, 5, 9), 12)
    assert found == 6
    pool.frozen_P[:] = False  # the pool forgets
    sources, _ = pool.extend(ints(second), ints(7))
    assert not len(sources)
    assert bad_rows(pool, [first, second], [2, 1]) == [second]  # reading it is fine, writing is not


def filed(pool):
    """Two prompts in the tree, nobody running."""
    texts = np.arange(8, dtype=np.int32), np.arange(20, 28, dtype=np.int32)
    for text in texts:
        slot, _ = pool.open(text, 8)
        pool.extend(ints(slot), ints(8))
        pool.file(slot, text)
        pool.close(slot)
    return texts


def test_a_right_prefix_hit_is_genuine_for_every_holder(pool):
    one, two = filed(pool)
    slots = [pool.open(np.append(t, 1).astype(np.int32), 12)[0] for t in (one, two, one)]
    pool.extend(ints(*slots), ints(9, 9, 9))
    assert bad_rows(pool, slots, [2, 2, 2]) == []
    assert pool.table_SL[slots[0], 0] == pool.table_SL[slots[2], 0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("ends_inside", [False, True])
def test_a_hit_on_the_page_of_other_tokens_condemns_the_request_and_heals_the_tree(pool, depth, ends_inside):
    one, two = filed(pool)
    path, other = pool.tree.match(one)[0], pool.tree.match(two)[0]
    path[depth].page = other[depth].page
    prompt = np.append(one[: 6 if ends_inside else 8], [99, 98]).astype(np.int32)
    slot, _ = pool.open(prompt, 12)
    pool.extend(ints(slot), ints(len(prompt)))
    assert bad_rows(pool, [slot]) == [slot]
    pool.abort(slot)
    slot, found = pool.open(prompt, 12)
    assert found == 4 * depth
    pool.extend(ints(slot), ints(len(prompt)))
    assert bad_rows(pool, [slot]) == []
    assert pool.tree.match(two)[0] == other


def test_a_filed_page_that_was_given_away_is_not_hit_twice(pool):
    one, _ = filed(pool)
    path, _ = pool.tree.match(one)
    pool.free.append(path[0].page)  # and still filed
    (taker,) = serve(pool, 4)
    prompt = np.append(one, 1).astype(np.int32)
    slot, _ = pool.open(prompt, 12)
    pool.extend(ints(slot), ints(9))
    assert bad_rows(pool, [taker, slot]) == [slot]
    pool.abort(slot)
    assert path[0].page not in pool.free
    slot, found = pool.open(prompt, 12)
    assert found == 0
    pool.extend(ints(slot), ints(9))
    assert bad_rows(pool, [taker, slot]) == []


def test_a_copy_made_from_a_page_that_was_just_given_away_condemns_the_request(pool):
    one, _ = filed(pool)
    prompt = np.append(one[:6], [99, 98]).astype(np.int32)
    slot, found = pool.open(prompt, 12)
    assert found == 6
    pool.tracker.free(pool.table_SL[slot, 1:2])
    sources, _ = pool.extend(ints(slot), ints(8))
    assert len(sources) == 1
    assert bad_rows(pool, [slot]) == [slot]


def test_an_abort_takes_pages_that_were_given_away_out_of_the_tree(pool):
    one, two = filed(pool)
    slot, found = pool.open(np.append(one, 1).astype(np.int32), 12)
    assert found == 8
    pool.extend(ints(slot), ints(9))
    pool.free.append(int(pool.table_SL[slot, 1]))
    (taker,) = serve(pool, 4)
    assert bad_rows(pool, [slot, taker]) == [slot]
    pool.abort(slot)
    assert pool.tree.match(one)[1] == 4  # the next request of this prefix need not find out by itself
    assert pool.tree.match(two)[1] == 8
    assert bad_rows(pool, [taker]) == []


# ---- the end of the counter ----


def test_a_tag_would_come_round_if_the_counter_did(pool):
    (slot,) = serve(pool, 4)
    pages = pool.table_SL[slot, :1].copy()
    pool.give(pages)
    assert bad_rows(pool, [slot]) == [slot]
    pool.tracker.generation_P[pages] = 0  # what a counter that wraps would do
    ledger = pool.tracker.expected_SL.copy()
    pool.tracker.grant(ints(slot + 1), ints(0), pages)
    pool.tracker.expected_SL[:] = ledger
    assert bad_rows(pool, [slot]) == []


@pytest.mark.parametrize("bits", [1, 2, 5])
def test_a_page_is_retired_before_its_counter_wraps_and_no_tag_repeats(bits):
    tags = PageTags(6, SIZE, 1, 6, bits=bits)
    pool = PagePool(6, SIZE, 1, 6, tags)
    seen = set()
    with pytest.raises(QuantkitError, match="never be admitted"):
        while True:
            slot, _ = pool.open(np.zeros(8, np.int32), 8)
            pool.extend(ints(slot), ints(8))
            lives = {(int(p), int(tags.tag_P[p])) for p in pool.table_SL[slot, :2]}
            assert not lives & seen
            seen |= lives
            pool.close(slot)
    assert len(seen) == 6 * (2**bits - 1)
    assert pool.retired == 6
    assert not pool.free


@pytest.mark.parametrize("bits", [0, 64, -1])
def test_impossible_counters_are_refused(bits):
    with pytest.raises(QuantkitError, match="no such width"):
        PageTags(4, 4, 1, 1, bits=bits)


# ---- wrong bytes in the right page ----


@pytest.mark.parametrize("format", ["bf16", "e4m3", "nvfp4", "mxfp4"])
def test_seals_see_every_changed_byte_of_filed_pages(format):
    rng = np.random.default_rng(3)
    cache = new_cache(format, 6, 2, 2, 64)
    parts = [p for p in (cache.k, cache.v, cache.k_block_scale, cache.v_block_scale) if p is not None]
    for part in parts:
        part[:] = rng.integers(0, 256, part.shape)
    seals = ContentSeals(cache)
    sealed = ints(4, 1, 2)
    seals.seal(sealed)
    assert int(seals.hash_P[4]) == plain.content_hash([p[4].tobytes() for p in parts])
    assert not len(seals.verify(sealed))
    for part in parts:
        raw = part.view(np.uint8).reshape(6, -1)
        for at in rng.integers(0, raw.shape[1], 12):
            raw[2, at] ^= 1 << rng.integers(8)
            assert seals.verify(sealed).tolist() == [2]
            seals.seal(ints(2))
        raw[0, 0] ^= 1  # not sealed
        assert not len(seals.verify(sealed))


def test_pages_of_odd_bytes_are_refused():
    with pytest.raises(QuantkitError, match="64-bit words"):
        ContentSeals(new_cache("e4m3", 2, 1, 1, 4))

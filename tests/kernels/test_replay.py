"""Replays on the real cache and kernel: tokens, admission, and every injected fault with and without page tags.

pytest tests/kernels/test_replay.py
"""

import numpy as np
import pytest
from oracle.decode import decode
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.paged import PagePool
from quantkit.kernels.replay import Fault, Injected, Replay
from quantkit.kernels.replay_faults import FAULTS, fault
from quantkit.kernels.replay_measure import (
    Setting,
    cache_for,
    inject_faults,
    measure_integrity,
    sweep,
)
from quantkit.kernels.replay_model import Heads, Model, Request, Workload, make_requests
from quantkit.kernels.tags import ContentSeals, PageTags

HEADS = Heads(4, 2, 16)
MODEL = Model(HEADS)
SIZE, SLOTS = 4, 16
BUSY = Workload(64, (3, 30), (6, 24), prefixes=3, prefix_tokens=21, repeat=0.5, per_step=2, seed=3)
REQUESTS = make_requests(BUSY)


def replay(faults=(), tags=True, format="e4m3", requests=REQUESTS, pages=200, slots=SLOTS, seals=False, seed=0, **more):
    longest = -(-max(len(r.prompt_T) + r.new_tokens for r in requests) // SIZE)
    tracker = PageTags(pages, SIZE, slots, longest, seed=5) if tags else None
    cache = cache_for(format, pages, SIZE, HEADS)
    sealed = {"seals": ContentSeals(cache)} if seals else {}
    pool = PagePool(pages, SIZE, slots, longest, tracker)
    return Replay(requests, MODEL, cache, pool, faults=faults, seed=seed, **sealed, **more)


@pytest.fixture(scope="module")
def clean():
    return replay(tags=False).run()


def same_tokens(result, expected, apart=()):
    """Every request but those `apart` has the expected tokens, and those have none."""
    for r, (got, want) in enumerate(zip(result.tokens, expected.tokens, strict=True)):
        assert got is None if r in apart else np.array_equal(got, want), r


def all_given_back(run, leaked=0):
    """Nothing is held but by the tree, and no page is free twice."""
    pool = run.pool
    filed = sorted(pool.tree.by_page)
    assert len(set(pool.free)) == len(pool.free)
    assert not set(pool.free) & set(filed)
    assert len(pool.free) + len(filed) + pool.retired + leaked == pool.pages
    assert (pool.refs_P[filed] == 1).all()
    assert not pool.promised_S.any()
    assert not pool.count_S.any()


# ---- right replays ----


@pytest.mark.parametrize("format", ["bf16", "e4m3"])
def test_a_shared_batched_request_has_the_tokens_it_would_have_alone(format):
    run = replay(format=format)
    result = run.run()
    assert max(result.running) == SLOTS
    assert result.hit_tokens > 500
    for request, got in zip(REQUESTS, result.tokens, strict=True):
        assert got.tolist() == decode(MODEL, request.prompt_T, request.new_tokens, format, run.cache.k_scale)
    all_given_back(run)


def test_page_tags_change_no_token_and_raise_no_alarm(clean):
    run = replay(seals=True, audit_every=1)
    result = run.run()
    same_tokens(result, clean)
    assert not result.aborted
    assert run.pool.tracker.checks > 10_000
    assert result.running == clean.running


def test_a_short_cache_makes_requests_wait_and_evicts_but_changes_no_token(clean):
    run = replay(pages=40)
    result = run.run()
    same_tokens(result, clean)
    assert max(result.running) < SLOTS
    assert len(result.seconds) > len(clean.seconds)
    all_given_back(run)


def test_a_request_for_one_token_and_one_that_fills_its_last_page():
    prompt = np.arange(8, dtype=np.int32)
    requests = [Request(0, prompt, 1), Request(0, prompt[:3], 5), Request(2, prompt, 9)]
    run = replay(requests=requests, pages=9, slots=2)
    result = run.run()
    for request, got in zip(requests, result.tokens, strict=True):
        assert got.tolist() == decode(MODEL, request.prompt_T, request.new_tokens, "e4m3", run.cache.k_scale)
    all_given_back(run)


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(QuantkitError, match="never be admitted"):
        replay(requests=[Request(0, np.zeros(50, np.int32), 1)], pages=10).run()


def test_lost_pages_are_an_error_not_an_endless_wait():
    run = replay(requests=[Request(0, np.zeros(36, np.int32), 4)], pages=10)
    run.pool.take(1)
    with pytest.raises(QuantkitError, match="pages were lost"):
        run.run()


# ---- faults ----


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_detected_and_only_its_requests_are_aborted(name, seed, clean):
    run = replay([fault(name, 12)], seed=seed)
    result = run.run()
    (injected,) = result.injected
    late = name in ("wrong prefix hit", "page reused between checks")  # when the page is hit; at the next check
    assert injected.detected is not None
    assert injected.detected == injected.step if not late else injected.detected > injected.step
    assert result.false_alarms == 0
    assert 1 <= len(result.aborted) <= (2 if name == "swapped pages" else 1)
    same_tokens(result, clean, apart=result.aborted)
    all_given_back(run, leaked=int(name == "wrong prefix hit"))  # the page that the tree forgot is nobody's to free


@pytest.mark.parametrize("name", FAULTS)
def test_without_tags_the_same_faults_do_harm(name, clean):
    """Else the test above would prove nothing: another answer, or the whole server stopped by a guard of its own."""
    harm = 0
    for seed in range(3):
        try:
            result = replay([fault(name, 12)], tags=False, seed=seed).run()
        except QuantkitError:
            harm += 1
        else:
            assert not result.aborted
            harm += any(not np.array_equal(a, b) for a, b in zip(result.tokens, clean.tokens, strict=True))
    assert harm


def test_no_page_of_an_aborted_request_enters_the_tree(clean):
    """Nor does a page that shares its fate: what a request has filed was checked twice before the fault."""
    run = replay([fault("free too early", 12)])
    while not run.result.aborted:
        slots = {int(run.request_S[s]): s for s in run.running}
        rows = {r: set(run.pool.table_SL[s, : run.pool.count_S[s]].tolist()) for r, s in slots.items()}
        filed = set(run.pool.tree.by_page)
        run.step()
    (victim,) = run.result.aborted
    assert not (set(run.pool.tree.by_page) - filed) & rows[victim]
    run.run()
    assert run.result.tokens[victim] is None


def test_what_was_computed_from_a_reused_page_is_never_shown():
    """The page is reused in the very step that computes the last token: one more check comes before it is shown."""
    requests = [Request(0, np.array([n, n, n], np.int32), new) for n, new in ((1, 7), (2, 30))]
    clean = replay(requests=requests, slots=2).run()
    caught = 0
    for seed in range(8):
        run = replay([fault("page reused between checks", 6)], requests=requests, slots=2, seed=seed)
        result = run.run()
        same_tokens(result, clean, apart=result.aborted)
        caught += result.aborted == [0] and [(f.step, f.detected) for f in result.injected] == [(6, 7)]
    assert caught


def flip_signs(replay, rng):
    """The values of a filed page that somebody is reading change their signs."""
    pool = replay.pool
    rows = [pool.table_SL[s, : pool.count_S[s]] for s in replay.running]
    shared = [p for p in np.unique(np.concatenate(rows)).tolist() if p in pool.tree.by_page]
    if not shared:
        return None
    page = shared[int(rng.integers(len(shared)))]
    replay.cache.v[page] ^= 0x80
    return Injected("flipped signs", replay.steps, frozenset({page}))


def test_wrong_bytes_are_beyond_tags_and_found_by_seals(clean):
    faults = [Fault(10, "before check", flip_signs)]
    unseen = replay(faults).run()
    assert not unseen.aborted
    assert any(not np.array_equal(a, b) for a, b in zip(unseen.tokens, clean.tokens, strict=True))
    run = replay(faults, seals=True, audit_every=1)
    result = run.run()
    assert result.detected == 1
    assert result.false_alarms == 0
    assert 0 < len(result.aborted) < 10
    same_tokens(result, clean, apart=result.aborted)
    all_given_back(run)


def test_all_faults_in_one_run_of_hundreds_of_requests():
    report = inject_faults(requests=200, concurrency=48, heads=HEADS)
    assert report.injected == report.detected == len(FAULTS)
    assert report.false_alarms == report.wrong == 0
    assert report.missed == []
    assert 0 < report.aborted < 20
    assert report.peak_running == 48


# ---- numbers ----

SMALL = Setting(HEADS, SIZE, 64, threads=1)


def test_the_sweep_shows_the_concurrency_that_only_fp8_admits():
    budget = 2 * 16 * 2 * 2 * 88 * 4  # keys and values in bf16 of four requests of 88 tokens
    rows = list(sweep(["bf16", "e4m3"], [1, 4, 8, 9], budget_bytes=budget, new_tokens=8, setting=SMALL))
    assert [(r.format, r.concurrency) for r in rows if r.admitted] == [
        ("bf16", 1), ("bf16", 4), ("e4m3", 1), ("e4m3", 4), ("e4m3", 8), ("e4m3", 9)
    ]  # fmt: skip
    assert rows[4].resident_tokens == 2 * rows[0].resident_tokens
    assert [r.running for r in rows if not r.admitted] == [4, 4]
    assert all((r.tokens_per_s is not None and r.tokens_per_s > 0) == r.admitted for r in rows)


def test_a_budget_below_one_page_is_refused():
    with pytest.raises(QuantkitError, match="does not hold one page"):
        list(sweep(["bf16"], [1], budget_bytes=100, setting=SMALL))


def test_the_cost_of_tags_is_measured_with_an_interval():
    cost = measure_integrity(3, seconds=0.1, setting=SMALL)
    assert cost.steps >= 48
    assert cost.sidecar_bytes == 16 * cost.pages
    assert cost.pages_checked >= 3 * 64 // SIZE
    for change in (cost.throughput, cost.p95, cost.cpu):
        assert change.ci95[0] <= change.pct <= change.ci95[1]
    assert cost.check_us > 0 < cost.null_us


@pytest.mark.parametrize(("concurrency", "seconds"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_nothing_to_measure_is_refused(concurrency, seconds):
    with pytest.raises(QuantkitError, match="nothing to measure"):
        measure_integrity(concurrency, seconds=seconds, setting=SMALL)

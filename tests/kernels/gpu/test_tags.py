"""The tag check in Triton against a loop over the pages."""

import numpy as np
import pytest
import torch
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.gpu.tags import check_tags


def batch(seed, requests, most, pages, device):
    """Requests of random length over random pages, all of them as they should be."""
    rng = np.random.default_rng(seed)
    actual = torch.from_numpy(rng.integers(-(2**63), 2**63, pages))
    table = torch.from_numpy(rng.integers(0, pages, (requests, most)).astype(np.int32))
    for r in range(requests):
        table[r, int(rng.integers(0, most + 1)) :] = -1
    expected = actual[table.clamp(min=0).long()]
    expected[table < 0] = torch.from_numpy(rng.integers(0, 99, int((table < 0).sum())))
    return expected.to(device), table.to(device), actual.to(device)


@pytest.mark.parametrize(("requests", "most", "pages"), [(5, 40, 300), (3, 1, 1), (2, 2500, 9000), (1, 0, 4)])
def test_no_false_alarm_and_every_wrong_tag(requests, most, pages, device):
    expected, table, actual = batch(0, requests, most, pages, device)
    assert check_tags(expected, table, actual).tolist() == [True] * requests
    for r in range(requests):
        held = int((table[r] >= 0).sum())
        for page in {0, held // 2, held - 1} if held else set():
            wrong = expected.clone()
            wrong[r, page] ^= 1 << 63 if page else 1
            assert check_tags(wrong, table, actual).tolist() == [q != r for q in range(requests)]
            outside = table.clone()
            outside[r, page] = pages
            untagged = expected.clone()
            untagged[r, page] = 0
            assert check_tags(untagged, outside, actual).tolist() == [q != r for q in range(requests)]


def test_a_page_that_changes_fails_all_who_hold_it(device):
    expected, table, actual = batch(1, 4, 8, 200, device)
    table[0, 0], table[2, 3] = 7, 7
    table[2, :4] = table[2, :4].clamp(min=0)
    expected = actual[table.clamp(min=0).long()]
    actual[7] += 1
    holds = (table == 7).any(1)
    assert torch.equal(check_tags(expected, table, actual), ~holds)
    assert holds[[0, 2]].all()


def test_no_requests(device):
    none = torch.empty(0, 3, dtype=torch.int64, device=device)
    assert check_tags(none, none.int(), torch.zeros(2, dtype=torch.int64, device=device)).shape == (0,)


def test_wrong_arrays_are_refused(device):
    expected, table, actual = batch(2, 2, 8, 20, device)
    cases = [(expected.int(), table, actual), (expected, table.long(), actual), (expected[:, :4], table, actual)]
    cases += [
        (expected, table, actual.int()),
        (expected, table.T.contiguous().T, actual),
        (expected[0], table[0], actual),
    ]
    for arrays in cases:
        with pytest.raises(QuantkitError, match="do not fit"):
            check_tags(*arrays)

"""Errors of a tensor from sums of its rows."""

import math

import numpy as np
import pytest
from quantkit.kernels import measure


def test_relative_error_and_sqnr():
    assert measure.relative_error(np.array([1.0, 3.0]), np.array([100.0, 300.0])) == pytest.approx(0.1)
    assert measure.sqnr_db(np.array([1.0, 3.0]), np.array([100.0, 300.0])) == pytest.approx(20.0)
    zero = np.zeros(2)
    assert measure.relative_error(zero, zero) == 0.0
    assert measure.sqnr_db(zero, np.ones(2)) == math.inf
    assert measure.relative_error(np.ones(2), zero) == math.inf
    assert measure.sqnr_db(np.ones(2), zero) == -math.inf


def test_neither_order_nor_chunks_of_rows_show():
    rng = np.random.default_rng(0)
    err, norm = np.exp(rng.normal(0, 20, 1000)), np.exp(rng.normal(0, 20, 1000))
    order = rng.permutation(1000)
    assert measure.relative_error(err, norm) == measure.relative_error(err[order], norm[order])


def test_differing_codes():
    a, b = np.array([0x12, 0x34, 0x56], np.uint8), np.array([0x13, 0x34, 0x65], np.uint8)
    assert measure.differing_codes(a, b, 8) == 2
    assert measure.differing_codes(a, b, 4) == 3

"""Errors of a tensor from sums of squares."""

import math

import numpy as np
import pytest
from quantkit.kernels import measure


def test_relative_error_and_sqnr():
    assert measure.relative_error(4.0, 400.0) == pytest.approx(0.1)
    assert measure.sqnr_db(0.1) == pytest.approx(20.0)
    assert measure.relative_error(0.0, 0.0) == 0.0
    assert measure.sqnr_db(0.0) == math.inf
    assert measure.relative_error(1.0, 0.0) == math.inf
    assert measure.sqnr_db(math.inf) == -math.inf


def test_differing_codes():
    a, b = np.array([0x12, 0x34, 0x56], np.uint8), np.array([0x13, 0x34, 0x65], np.uint8)
    assert measure.differing_codes(a, b, 8) == 2
    assert measure.differing_codes(a, b, 4) == 3

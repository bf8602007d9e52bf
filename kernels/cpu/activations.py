"""Activations quantised to NVFP4 with a given second-level scale, as a W4A4 kernel does it for each token.

Source: NVIDIA ModelOpt and compressed-tensors (`input_scale`, local dynamic quantisation); blocks of 16 inputs.
Letters: T tokens, I inputs.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray
from quantkit.kernels.cpu.convert import (
    e2m1_code_to_f32,
    e4m3_code_to_f32,
    f32_to_e2m1_code,
    f32_to_e4m3_code,
)

F32 = NDArray[np.float32]

GROUP = 16


@njit(nogil=True, cache=True, error_model="numpy")
def quantize_activations(x_TI: F32, input_scale: np.float32, out_TI: F32) -> None:
    """What the codes stand for, less `input_scale`: e2m1 * e4m3 block scale, exact in float32.

    A block's scale is e4m3(amax / (6 input_scale)), clamped to [2^-9, 448] first; a code is the nearest to
    x / (scale * input_scale). An all-zero block gives zeros. I is a multiple of 16; x must be finite.
    """
    for t in range(x_TI.shape[0]):
        for i in range(0, x_TI.shape[1], GROUP):
            amax = np.float32(0)
            for k in range(i, i + GROUP):
                amax = max(amax, abs(x_TI[t, k]))
            scale = min(max(amax / (np.float32(6) * input_scale), np.float32(2.0**-9)), np.float32(448))
            stored = e4m3_code_to_f32(f32_to_e4m3_code(scale))
            for k in range(i, i + GROUP):
                out_TI[t, k] = e2m1_code_to_f32(f32_to_e2m1_code(x_TI[t, k] / (stored * input_scale))) * stored

"""The page-tag check on a GPU: one launch over the batch, before attention, one program a request.

A request recorded a tag when it was given a page; the check compares it with the tag that the page has now. What tags
are, and what the answer leads to, is in `kernels/tags.py`.

Shape suffixes: R requests, L logical pages of a request, P physical pages.
"""

from __future__ import annotations

import torch
import triton.language as tl
from quantkit.kernels.errors import QuantkitError
from quantkit.kernels.gpu.jit import check_device, jit
from torch import Tensor

_BLOCK = 1024  # pages compared at a time


def check_tags(expected_RL: Tensor, pages_RL: Tensor, actual_P: Tensor) -> Tensor:
    """Answer, as bool [R] on the device: True where every page of a request has the tag that is expected of it.

    expected_RL int64 [R, L]; pages_RL int32 [R, L], negative where a request has no page; actual_P int64 [P]. A page
    beyond P has no tag, so its request fails. Nothing waits for the device.
    """
    requests, most = _check(expected_RL, pages_RL, actual_P)
    good_R = torch.empty(requests, dtype=torch.bool, device=actual_P.device)
    if requests:
        compare[(requests,)](
            expected_RL, pages_RL, actual_P, good_R.view(torch.int8), most, actual_P.shape[0], BLOCK=_BLOCK
        )
    return good_R


def _check(expected_RL: Tensor, pages_RL: Tensor, actual_P: Tensor) -> tuple[int, int]:
    shape = tuple(pages_RL.shape)
    parts = (
        ("expected tags", expected_RL, torch.int64, shape),
        ("pages", pages_RL, torch.int32, shape),
        ("tags", actual_P, torch.int64, tuple(actual_P.shape)),
    )
    for (what, array, dtype, size), rank in zip(parts, (2, 2, 1), strict=True):
        if array.dtype != dtype or tuple(array.shape) != size or array.ndim != rank or not array.is_contiguous():
            shown = f"{array.dtype} {list(array.shape)}, strides {array.stride()}"
            raise QuantkitError(f"{what} do not fit", value=shown, allowed=f"{dtype} of rank {rank}, contiguous")
        check_device(array)
    return shape[0], shape[1]


@jit
def compare(
    expected_ptr: tl.tensor, pages_ptr: tl.tensor, actual_ptr: tl.tensor, good_ptr: tl.tensor, most: tl.tensor,
    pages: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store 1 for a request whose pages all have their tags, else 0; the grid is (requests,)."""
    request = tl.program_id(0).to(tl.int64)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, most, BLOCK):
        at_L = first + tl.arange(0, BLOCK)
        page_L = tl.load(pages_ptr + request * most + at_L, mask=at_L < most, other=-1)
        expected_L = tl.load(expected_ptr + request * most + at_L, mask=at_L < most, other=0)
        actual_L = tl.load(actual_ptr + page_L, mask=(page_L >= 0) & (page_L < pages), other=0)
        wrong |= ((page_L >= pages) | ((page_L >= 0) & (actual_L != expected_L))).to(tl.int32)
    tl.store(good_ptr + request, (tl.max(wrong, 0) == 0).to(tl.int8))

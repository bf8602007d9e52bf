"""What is watched while a block runs: inputs of linear layers, and the keys and values an engine would cache.

Letters: T tokens, I inputs, H KV heads, Q query heads, D head values, C latent + RoPE values of an MLA cache row.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Observer(Protocol):
    """Called while a block runs, in the order of its layers. Tensors are detached and hold real tokens only."""

    def linear(self, modules: tuple[str, ...], x_TI: torch.Tensor) -> None:
        """The input of layers that see the same one; of a routed expert only its tokens, and no call without any."""
        ...

    def kv(self, layer: int, q_TQD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """What an engine caches, and its queries: after RoPE and q/k norm, before KV heads are repeated."""
        ...

    def latent(self, layer: int, row_TC: torch.Tensor) -> None:
        """MLA, in place of `kv`: normalised latent and roped k_pe in one row."""
        ...

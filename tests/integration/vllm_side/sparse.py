"""An attention backend for models with an indexer, which vLLM's CPU platform has none for: enough to build and load them."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl


class SparseImpl(CPUMLAImpl):
    """CPU MLA that takes, and does not use, what the indexer gives it; it is never run."""

    def __init__(self, *args: Any, topk_indices_buffer: Any = None, indexer: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class SparseBackend(CPUMLABackend):
    """Names the implementation above."""

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl

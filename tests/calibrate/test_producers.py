"""Tracing what scales the inputs of linear layers: known families, and small forwards that must not be scaled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES
from quantkit.calibrate.meta_model import build, find_layers, run_on_meta
from quantkit.calibrate.producers import Source, find_sources
from torch import Tensor, nn


def sources_of(family: str, folder: Path) -> list[Source]:
    """Of the last layer."""
    model, _, _ = build(FAMILIES[family](folder / "m"), torch.float32, False)
    _, layers = find_layers(model)
    return find_sources(model, list(layers), lambda: run_on_meta(model))[-1]


def maker(sources: list[Source], reader: str) -> str:
    """`producer + first row` of the tensor that a weight reads."""
    (source,) = [s for s in sources if reader in s.readers]
    return source.reason if source.producer is None else f"{source.producer.weight} + {source.producer.first}"


@pytest.mark.parametrize(
    ("family", "reader", "expected"),
    [
        ("llama", "self_attn.k_proj.weight", "input_layernorm.weight + 0"),
        ("llama", "self_attn.o_proj.weight", "self_attn.v_proj.weight + 0"),
        ("llama", "mlp.gate_proj.weight", "post_attention_layernorm.weight + 0"),
        ("llama", "mlp.down_proj.weight", "mlp.up_proj.weight + 0"),
        ("gemma2", "mlp.gate_proj.weight", "no norm and no projection scales its input"),
        ("gemma2", "mlp.down_proj.weight", "mlp.up_proj.weight + 0"),
        ("phi3", "mlp.down_proj.weight", "mlp.gate_up_proj.weight + 512"),
        ("phi3", "self_attn.o_proj.weight", "no norm and no projection scales its input"),
        ("qwen3_moe", "mlp.experts.gate_up_proj", "post_attention_layernorm.weight + 0"),
        ("qwen3_moe", "mlp.experts.down_proj", "mlp.experts.gate_up_proj + 128"),
        ("gpt_oss", "mlp.experts.gate_up_proj", "post_attention_layernorm.weight + 0"),
        ("gpt_oss", "mlp.experts.down_proj", "no norm and no projection scales its input"),
        ("deepseek_v32", "self_attn.indexer.wk.weight", "input_layernorm.weight + 0"),
        ("deepseek_v32", "self_attn.q_b_proj.weight", "self_attn.q_a_layernorm.weight + 0"),
        ("deepseek_v32", "self_attn.o_proj.weight", "no norm and no projection scales its input"),
    ],
)
def test_families(family: str, reader: str, expected: str, tmp_path: Path) -> None:
    assert maker(sources_of(family, tmp_path), reader) == expected


def test_every_reader_of_a_tensor_is_found(tmp_path: Path) -> None:
    (source,) = [s for s in sources_of("qwen2_moe", tmp_path) if "mlp.experts.gate_up_proj" in s.readers]
    assert set(source.readers) == {
        "mlp.gate.weight",
        "mlp.experts.gate_up_proj",
        "mlp.shared_expert_gate.weight",
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
    }


def test_query_heads_share_the_rows_of_their_kv_head(tmp_path: Path) -> None:
    (source,) = [s for s in sources_of("qwen2", tmp_path) if "self_attn.o_proj.weight" in s.readers]
    assert source.producer is not None and source.producer.bias == "self_attn.v_proj.bias"
    rows = source.producer.rows(128)  # 4 query heads of 32 values, 2 KV heads
    assert rows.tolist() == [*range(32), *range(32), *range(32, 64), *range(32, 64)]


class Layer(nn.Module):
    """A norm and projections of width 8, and a forward that a test gives."""

    def __init__(self, forward: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def traced(forward: Callable[[Layer, Tensor], Tensor]) -> dict[str, Source]:
    with torch.device("meta"):
        layer = Layer(forward)
        x = torch.empty(1, 2, 8)
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    return {n: s for s in find_sources(model, [layer], lambda: layer(x))[0] for n in s.readers}


def test_a_plain_norm_is_found() -> None:
    found = traced(lambda m, x: m.a(m.weight * x) + x)
    assert found["a.weight"].producer is not None and found["a.weight"].producer.weight == "weight"


@pytest.mark.parametrize(
    ("forward", "reader"),
    [
        (lambda m, x: (t := m.weight * x) + m.a(t), "a.weight"),  # the residual reads the norm's output as well
        (lambda m, x: m.a((1 + m.weight) * x), "a.weight"),  # not linear in the weight
        (lambda m, x: m.a(m.weight * x) + m.b(m.weight * x), "a.weight"),  # one weight makes two tensors
        (lambda m, x: m.a((t := m.weight * x).relu_()) + m.b(t), "a.weight"),  # changed in place
        (lambda m, x: m.b(m.a(x) * m.a(x)), "b.weight"),  # a row that is used twice
        (lambda m, x: m.c((y := m.b(x)) * torch.sigmoid(y)), "c.weight"),  # SiLU is no product of two tensors
        (lambda m, x: m.b(torch.relu(m.a(x))), "b.weight"),
        (lambda m, x: m.b(m.a(x).transpose(1, 2).reshape(1, 2, 8)), "b.weight"),  # channels are mixed
        (lambda m, x: m.b((m.weight * x).flip(2)), "b.weight"),
        (lambda m, x: m.b(t := m.weight * x) + t @ m.a.weight, "b.weight"),  # columns of `a` are outputs
        (lambda m, x: m.b((m.weight * x)[:, :1].clone()), "b.weight"),  # a part
    ],
)
def test_what_must_not_be_scaled(forward: Callable[[Layer, Tensor], Tensor], reader: str) -> None:
    found = traced(forward)
    assert found[reader].producer is None and found[reader].reason


def test_a_forward_that_cannot_be_traced_gives_nothing() -> None:
    def fails(m: Layer, x: Tensor) -> Tensor:
        raise NotImplementedError

    assert traced(fails) == {}

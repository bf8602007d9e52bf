"""Hub ids as sources: the real client of huggingface_hub fetches from a small server that speaks the Hub's endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from families import FAMILIES, tiny
from hub_client import document, point_to, quantkit, refused, used_hub
from hub_server import Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with used_hub(monkeypatch, tmp_path) as server:
        yield server


def test_checkpoint_of_a_hub_id(hub: Hub, tmp_path: Path) -> None:
    folder = FAMILIES["llama"](tmp_path / "served")
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    hub.add_folder("org/tiny", folder)
    status, said = quantkit("quantize", "org/tiny", "-r", "fp8-channel", "-o", tmp_path / "o", "--json")
    assert status == 0, said
    assert document(said)["verify"]["passed"]
    assert (tmp_path / "o" / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    assert not any("pytorch_model.bin" in a for a in hub.asked), "pickles are not even fetched"
    served = hub.served
    assert quantkit("plan", "org/tiny", "-r", "fp8-channel")[0] == 0
    assert hub.served == served, "what is in the cache is not asked for again"


@pytest.mark.parametrize("shards", [1, 3])
def test_plan_reads_headers_only(hub: Hub, tmp_path: Path, shards: int) -> None:
    folder = tiny(tmp_path / "served", "llama", shards=shards, intermediate_size=2048, vocab_size=2048)
    total = sum(len(d) for d in hub.add_folder("org/tiny", folder).files().values())
    status, said = quantkit("plan", "org/tiny", "-r", "int4", "--group", "32", "--json")
    assert status == 0, said
    assert hub.served < shards * 100_001 + 20_000 < total / 10
    local = quantkit("plan", folder, "-r", "int4", "--group", "32", "--json")[1]
    assert {**document(said), "source": ""} == {**document(local), "source": ""}
    assert "models--org--tiny" in document(said)["source"], "as after a fetch"
    assert quantkit("inspect", "org/tiny")[0] == 0
    assert not list(tmp_path.glob("cache/**/*.safetensors"))


def test_header_that_lies_is_refused_from_afar_too(hub: Hub, tmp_path: Path) -> None:
    folder = FAMILIES["llama"](tmp_path / "served")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data.replace(b"[384,256]", b"[384,255]", 1))
    hub.add_folder("org/tiny", folder)
    said = refused("plan", "org/tiny", "-r", "fp8-channel")
    assert "data_offsets disagree" in said


def test_repository_that_does_not_exist(hub: Hub) -> None:
    for command in (["plan"], ["quantize", "-o", "unused"]):
        said = refused(*command, "org/other", "-r", "int4")
        assert "cannot fetch from the Hub" in said
        assert "org/other" in said


def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point_to("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    said = refused("plan", "org/tiny", "-r", "int4")
    assert "cannot fetch from the Hub" in said

"""The quantkit command in this process or another, pointed at the Hub of the tests."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import TOKEN, Hub, running_hub
from quantkit.quantize.cli.main import app, run_app


@contextlib.contextmanager
def used_hub(monkeypatch: pytest.MonkeyPatch, room: Path) -> Iterator[Hub]:
    """A Hub that huggingface_hub uses in this process, with a token that may write."""
    import huggingface_hub.constants

    with running_hub() as server:
        point_to(server.url, monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(room / "no-token"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(room / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_ENDPOINT was read when huggingface_hub was imported: set what it became."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def environment(hub: Hub, room: Path) -> dict[str, str]:
    """What another process needs to use the same Hub."""
    rest = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return rest | {
        "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN, "HF_HOME": str(room / "home"),
    }  # fmt: skip


def quantkit(*words: object) -> tuple[int, str]:
    """(exit status, everything printed) of a command, run in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = run_app(lambda: app([str(w) for w in words]))
    return status, printed.getvalue()


def document(said: str) -> dict[str, Any]:
    """The JSON document among everything printed."""
    found: dict[str, Any] = json.loads(said[said.index("{\n") : said.rindex("\n}") + 2])
    return found


def refused(*words: object) -> str:
    """What a refused command prints; the token is not in it."""
    status, said = quantkit(*words)
    assert status == 2, said
    assert TOKEN not in said
    return said


def contents(folder: Path) -> dict[str, bytes]:
    """The files that are published of a folder."""
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {n: d for n, d in found.items() if not n.startswith(".")}

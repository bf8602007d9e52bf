"""Hub ids: the real client of huggingface_hub fetches a checkpoint from a small server that speaks the Hub's endpoints."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from families import FAMILIES

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """`GET /api/models/ORG/NAME/...` and `GET|HEAD /ORG/NAME/resolve/REVISION/FILE` over a folder."""

    folder: Path
    asked: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path = self.path.split("?")[0]
        names = sorted(p.name for p in self.folder.iterdir())
        if path.startswith("/api/models/org/tiny/tree/"):
            entries = [
                {"type": "file", "path": n, "oid": "0" * 40, "size": (self.folder / n).stat().st_size} for n in names
            ]
            self.send(json.dumps(entries).encode(), body=body)
        elif path.startswith("/api/models/org/tiny"):
            info = {
                "id": "org/tiny",
                "modelId": "org/tiny",
                "sha": COMMIT,
                "siblings": [{"rfilename": n} for n in names],
                "tags": [],
                "private": False,
            }
            self.send(json.dumps(info).encode(), body=body)
        elif path.startswith("/org/tiny/resolve/") and path.rsplit("/", 1)[1] in names:
            data = (self.folder / path.rsplit("/", 1)[1]).read_bytes()
            self.send(data, body=body, etag=hashlib.sha256(data).hexdigest())
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send(self, data: bytes, *, body: bool, etag: str = "x") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    asked: list[str] = []
    folder = FAMILIES["llama"](tmp_path / "served")
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    handler = type("Handler", (Hub,), {"folder": folder, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder, asked
    server.shutdown()
    server.server_close()
    thread.join()


def quantkit(endpoint: str, cache: Path, *args: object) -> subprocess.CompletedProcess[str]:
    unset = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment = unset | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "quantkit.quantize.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_checkpoint_of_a_hub_id(hub: tuple[str, Path, list[str]], tmp_path: Path) -> None:
    endpoint, folder, asked = hub
    done = quantkit(
        endpoint, tmp_path / "cache", "quantize", "org/tiny", "-r", "fp8-channel", "-o", tmp_path / "o", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verify"]["passed"]
    assert (tmp_path / "o" / "generation_config.json").read_bytes() == (folder / "generation_config.json").read_bytes()
    assert not any("pytorch_model.bin" in a for a in asked), "pickles are not even fetched"
    assert quantkit(endpoint, tmp_path / "cache", "plan", "org/tiny", "-r", "fp8-channel").returncode == 0


def test_repository_that_does_not_exist(hub: tuple[str, Path, list[str]], tmp_path: Path) -> None:
    done = quantkit(hub[0], tmp_path / "cache", "plan", "org/other", "-r", "int4")
    assert done.returncode == 2
    assert "cannot fetch from the Hub" in done.stderr
    assert "org/other" in done.stderr
    assert "Traceback" not in done.stderr


def test_hub_that_does_not_answer(tmp_path: Path) -> None:
    done = quantkit("http://127.0.0.1:9", tmp_path / "cache", "plan", "org/tiny", "-r", "int4")
    assert done.returncode == 2
    assert "cannot fetch from the Hub" in done.stderr
    assert "Traceback" not in done.stderr

"""`export --stream-upload`: shards are sent while later ones are written and leave the disk, whatever is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from families import tiny
from hub_client import contents, environment, quantkit, refused, used_hub
from hub_server import Fault, Hub
from quantkit.quantize.shipping import WAITING, Shipping

RECIPE = """weights:
  - {match: {role: "*"}, scheme: fp8-channel}
outputs: [{shard_size: 200000}]
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with used_hub(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama"), "llama", shards=2)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "small.yaml"
    file.write_text(RECIPE)
    return file


@pytest.fixture(scope="module")
def plain(source: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What `export` writes."""
    out = tmp_path_factory.mktemp("plain") / "o"
    status, said = quantkit("export", source, "-r", recipe, "-o", out, "--jobs", 2)
    assert status == 0, said
    found = contents(out)
    assert sum(n.endswith(".safetensors") for n in found) >= 5
    return found


def test_export_and_push_in_one_command(hub: Hub, source: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    status, said = quantkit("export", source, "-r", recipe, "-o", out, "--push-to", "org/new", "--private")
    assert status == 0, said
    assert hub.repos["org/new"].private
    assert hub.repos["org/new"].files() == contents(out)


def test_what_the_hub_refuses_is_refused_before_the_work(hub: Hub, source: Path, recipe: Path, tmp_path: Path) -> None:
    hub.add("org/taken", {"config.json": b"{}"})
    for more in ([], ["--stream-upload"]):
        said = refused("export", source, "-r", recipe, "-o", tmp_path / "o", "--push-to", "org/taken", *more)
        assert "holds other files" in said
        assert not (tmp_path / "o").exists()
    refused("export", source, "-r", "int5", "-o", tmp_path / "o", "--push-to", "org/new")
    assert "org/new" not in hub.repos, "a mistyped recipe left an empty repository"
    assert "--push-to ORG/NAME" in refused("export", source, "-r", recipe, "-o", tmp_path / "o", "--stream-upload")
    said = refused(
        "export", source, "-r", recipe, "-o", tmp_path / "o", "--push-to", "org/taken", "--stream-upload", "--create-pr"
    )
    assert "pull request" in said


def test_shards_leave_the_disk(hub: Hub, source: Path, recipe: Path, plain: dict[str, bytes], tmp_path: Path) -> None:
    hub.add("org/new", {"old.safetensors": b"x"})
    out = tmp_path / "o"
    words = ["export", source, "-r", recipe, "-o", out, "--push-to", "org/new", "--stream-upload"]
    status, said = quantkit(*words, "--force")
    assert status == 0, said
    repo = hub.repos["org/new"]
    assert repo.files() == plain
    assert not list(out.glob("*.safetensors"))
    assert contents(out) == {n: d for n, d in plain.items() if not n.endswith(".safetensors")}
    assert "config.json" in repo.commits[-1][2]
    assert all("config.json" not in names for _, _, names in repo.commits[:-1])
    commits = len(repo.commits)
    status, said = quantkit(*words)
    assert status == 0, said
    assert len(repo.commits) == commits, "nothing is left to do"
    del repo.branches["main"][sorted(n for n in plain if n.startswith("model-00002"))[0]]
    assert "is not on the Hub" in refused(*words)


def test_failed_upload_stops_the_run_and_it_goes_on(
    hub: Hub, source: Path, recipe: Path, plain: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o"
    words = ["export", source, "-r", recipe, "-o", out, "--push-to", "org/new", "--stream-upload"]
    hub.faults = [Fault("403", "POST", "/commit/", after=1)]
    assert "no right to write" in refused(*words)
    assert not out.exists()
    assert len(hub.repos["org/new"].files()) == 1
    said = refused("export", source, "-r", recipe, "-o", out)
    assert "on the Hub only" in said
    sent = hub.sent
    status, said = quantkit(*words)
    assert status == 0, said
    assert hub.repos["org/new"].files() == plain
    assert hub.sent - sent < sum(len(d) for n, d in plain.items() if n.endswith(".safetensors"))


def test_workers_wait_for_a_slow_network() -> None:
    ship = Shipping(SimpleNamespace())  # type: ignore[arg-type]
    stop, admitted = threading.Event(), threading.Event()
    ship.admit(stop)  # nothing waits: at once

    def worker() -> None:
        ship.admit(stop)
        admitted.set()

    ship._waiting = WAITING
    thread = threading.Thread(target=worker, daemon=True)
    thread.start()
    assert not admitted.wait(0.5), "no step is handed out while finished shards wait"
    ship._waiting -= 1
    assert admitted.wait(5)
    thread.join()


def test_killed_while_writing_and_sending(
    hub: Hub, source: Path, recipe: Path, plain: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "o"
    words = ["export", source, "-r", recipe, "-o", out, "--push-to", "org/new", "--stream-upload", "--jobs", 2]
    command = [sys.executable, "-m", "quantkit.quantize.cli.main", *map(str, words)]
    chosen = random.Random(1)
    hub.slow = 0.01
    killed = 0
    for _ in range(int(os.environ.get("QUANTKIT_KILLS", "8")) // 2):
        hub.asked.clear()
        point = chosen.randrange(4, 20)
        client = subprocess.Popen(
            command, env=environment(hub, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while client.poll() is None and len(hub.asked) < point:
            time.sleep(0.002)
        time.sleep(chosen.random() * 0.03)
        killed += client.poll() is None
        client.send_signal(signal.SIGKILL)
        client.wait()
        held = hub.repos["org/new"].files() if "org/new" in hub.repos else {}
        assert "config.json" not in held or held == plain
        if held == plain:
            hub.repos.clear()
            hub.objects.clear()
            shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(tmp_path / "o.partial", ignore_errors=True)
    assert killed >= 2
    hub.slow = 0.0
    status, said = quantkit(*words)
    assert status == 0, said
    assert hub.repos["org/new"].files() == plain
    assert not list(out.glob("*.safetensors"))

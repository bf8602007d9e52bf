"""Publishing: the real client of huggingface_hub against a Hub in memory that fails on request."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hub_client import contents, environment, quantkit, refused, used_hub
from hub_server import READ_ONLY, TOKEN, Fault, Hub, is_lfs, sha256
from safetensors.numpy import save_file

SHARDS = 6


def checkpoint(folder: Path, seed: int = 0) -> Path:
    """Six shards of 256 KB with an index, a card and a side file in a folder."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    where = {}
    for i in range(SHARDS):
        name = f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file({f"w{i}": rng.standard_normal((256, 256)).astype(np.float32)}, folder / name)
        where[f"w{i}"] = name
    index = {"metadata": {"total_size": SHARDS * 4 * 256 * 256}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with used_hub(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were to be waited; nobody waits."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_publishes_shards_first_and_what_loads_last(hub: Hub, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "secret").write_text("hidden files stay here")
    status, said = quantkit("push", folder, "org/new", "--private")
    assert status == 0, said
    repo = hub.repos["org/new"]
    assert repo.private
    assert repo.files() == contents(folder)
    first, second = repo.commits
    assert all(n.endswith(".safetensors") for n in first[2])
    assert {"config.json", "model.safetensors.index.json", "README.md"} <= set(second[2])
    assert f"published: {hub.url}/org/new, 10 files" in said
    assert TOKEN not in said


def test_large_files_in_parts(hub: Hub, tmp_path: Path) -> None:
    hub.part_bytes = 100_000
    folder = checkpoint(tmp_path / "c")
    assert quantkit("push", folder, "org/new")[0] == 0
    assert hub.repos["org/new"].files() == contents(folder)
    assert len(hub.parts) == 3 * SHARDS


def test_again_sends_nothing_and_a_changed_file_needs_force(hub: Hub, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    assert quantkit("push", folder, "org/new")[0] == 0
    sent, commits = hub.sent, len(hub.repos["org/new"].commits)
    assert quantkit("push", folder, "org/new")[0] == 0
    assert (hub.sent, len(hub.repos["org/new"].commits)) == (sent, commits)
    (folder / "README.md").write_text("another card")
    assert "README.md" in refused("push", folder, "org/new")
    assert quantkit("push", folder, "org/new", "--force")[0] == 0
    assert hub.repos["org/new"].commits[-1][2] == ["README.md"]


def test_bytes_read_at_most_twice(hub: Hub, tmp_path: Path) -> None:
    """Counted by the system: the server keeps files in memory, so all reads of files are the client's."""
    folder = checkpoint(tmp_path / "c")
    before = _read_by_us()
    assert quantkit("push", folder, "org/new")[0] == 0
    received = hub.sent  # the server reads from sockets what the client sends
    total = sum(len(d) for n, d in contents(folder).items() if is_lfs(n, len(d)))
    assert received == total
    assert _read_by_us() - before - received < 2.5 * total
    before = _read_by_us()
    assert quantkit("push", folder, "org/new")[0] == 0
    assert _read_by_us() - before < 0.5 * total, "the hashes are remembered"


def _read_by_us() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_repository_with_other_files(hub: Hub, tmp_path: Path) -> None:
    old = {f"old-{i}.safetensors": b"x" for i in range(7)} | {"config.json": b"{}"}
    repo = hub.add("org/taken", old)
    folder = checkpoint(tmp_path / "c")
    said = refused("push", folder, "org/taken")
    assert "config.json, old-0.safetensors" in said
    assert "and 3 more" in said
    assert "--force" in said
    assert repo.files() == old
    assert hub.sent == 0
    assert quantkit("push", folder, "org/taken", "--force")[0] == 0
    assert repo.files() == contents(folder)
    assert "-config.json" in repo.commits[0][2], "new shards never stand beside the old configuration"


def test_new_branch_is_empty_and_main_stays(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("org/taken", {"config.json": b"{}"})
    folder = checkpoint(tmp_path / "c")
    status, said = quantkit("push", folder, "org/taken", "--revision", "int4", "--json")
    assert status == 0, said
    assert repo.files("int4") == contents(folder)
    assert repo.files() == {"config.json": b"{}"}
    assert f'"url": "{hub.url}/org/taken/tree/int4"' in said


def test_pull_request(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("org/taken", {"README.md": b"old"})
    folder = checkpoint(tmp_path / "c")
    status, said = quantkit("push", folder, "org/taken", "--create-pr", "--force")
    assert status == 0, said
    assert repo.files("refs/pr/1") == contents(folder)
    assert repo.files() == {"README.md": b"old"}
    assert "refs/pr/2" not in repo.branches
    assert "refs/pr/1" in said


@pytest.mark.parametrize(
    "fault",
    [
        Fault("429", "PUT", "/lfs/", times=2, headers={"Retry-After": "7"}),
        Fault("500", "PUT", "/lfs/", times=3),
        Fault("503", "POST", "/commit/", times=2),
        Fault("429", "POST", "/commit/", after=1, headers={"Retry-After": "11"}),
        Fault("500", "POST", "repos/create"),
        Fault("502", "GET", "/tree/", times=2),
        Fault("reset", "PUT", "/lfs/", times=3),
        Fault("reset", "POST", "/commit/"),
        Fault("lost", "POST", "/commit/"),
        Fault("lost", "POST", "/commit/", after=1),
        Fault("lost", "PUT", "/lfs/", times=2),
    ],
    ids=lambda f: f"{f.kind}-{f.method}-{f.path.strip('/').split('/')[-1]}-{f.after}",
)
def test_faults_that_pass(hub: Hub, waits: list[float], tmp_path: Path, fault: Fault) -> None:
    repo = hub.add("org/old", {"stale.safetensors": b"x"})
    hub.faults = [fault]
    folder = checkpoint(tmp_path / "c")
    status, said = quantkit("push", folder, "org/old", "--force")
    assert status == 0, said
    assert fault.times == 0, "the fault has happened"
    assert repo.files() == contents(folder)
    assert len(waits) >= 1
    if "Retry-After" in fault.headers:
        assert max(waits) >= int(fault.headers["Retry-After"]), "waits as long as the Hub asks for"


def test_pull_request_is_not_opened_twice(hub: Hub, waits: list[float], tmp_path: Path) -> None:
    repo = hub.add("org/taken")
    hub.faults = [Fault("lost", "POST", "/commit/")]
    refused("push", checkpoint(tmp_path / "c"), "org/taken", "--create-pr")
    assert [b for b in repo.branches if b.startswith("refs/")] == ["refs/pr/1"]
    assert quantkit("push", tmp_path / "c", "org/taken", "--revision", "refs/pr/1")[0] == 0
    assert repo.files("refs/pr/1") == contents(tmp_path / "c")


@pytest.mark.parametrize("kind", ["500", "reset"])
def test_hub_gone_in_the_middle_and_back(hub: Hub, waits: list[float], tmp_path: Path, kind: str) -> None:
    folder = checkpoint(tmp_path / "c")
    hub.faults = [Fault(kind, "PUT", "/lfs/", after=4, times=10_000)]
    said = refused("push", folder, "org/new")
    assert "cannot be reached" in said
    assert "run the same command again" in said
    assert hub.repos["org/new"].files() == {}, "nothing is visible before all shards are there"
    assert len(waits) < 100
    hub.faults, sent = [], hub.sent
    assert quantkit("push", folder, "org/new")[0] == 0
    assert hub.repos["org/new"].files() == contents(folder)
    assert hub.sent - sent <= 3 * 262_300, "shards that are there are not sent again"


def test_long_rate_limit_is_not_slept_through(hub: Hub, waits: list[float], tmp_path: Path) -> None:
    hub.faults = [Fault("429", "POST", "/commit/", times=100, headers={"Retry-After": "3600"})]
    said = refused("push", checkpoint(tmp_path / "c"), "org/new")
    assert "429" in said
    assert sum(waits) < 3600


def test_other_bytes_stored(hub: Hub, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    hub.faults = [Fault("corrupt", "PUT", "/lfs/", after=2)]
    said = refused("push", folder, "org/new")
    assert "the Hub holds other bytes than were sent" in said
    assert "config.json" not in hub.repos["org/new"].files(), "a damaged upload is not made loadable"
    assert "holds other files" in refused("push", folder, "org/new")
    assert quantkit("push", folder, "org/new", "--force")[0] == 0
    assert hub.repos["org/new"].files() == contents(folder)


def test_no_token(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_TOKEN")
    said = refused("push", checkpoint(tmp_path / "c"), "org/new")
    assert "no token for the Hub" in said
    assert hub.repos == {}


def test_token_without_the_right_to_write(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repo = hub.add("org/old")
    monkeypatch.setenv("HF_TOKEN", READ_ONLY)
    folder = checkpoint(tmp_path / "c")
    for name in ("org/old", "org/new"):
        said = refused("push", folder, name)
        assert "no right to write" in said
        assert READ_ONLY not in said
    assert repo.files() == {}
    assert "org/new" not in hub.repos
    assert hub.sent == 0


def test_token_that_is_not_accepted_and_echoed(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    hub.faults = [Fault("400", "POST", "repos/create", message="bad {authorization}")]
    assert "***" in refused("push", folder, "org/new")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    said = refused("push", folder, "org/new")
    assert "does not accept the token" in said
    assert "hf_wrong" not in said


def test_private_for_a_public_repository(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/public")
    assert "is public" in refused("push", checkpoint(tmp_path / "c"), "org/public", "--private")
    assert hub.sent == 0


def test_folder_that_is_no_sound_checkpoint(hub: Hub, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    shard = folder / f"model-00001-of-{SHARDS:05d}.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "truncated" in refused("push", folder, "org/new")
    shard.unlink()
    assert "missing" in refused("push", folder, "org/new")
    assert "no such folder" in refused("push", tmp_path / "none", "org/new")
    assert "ORG/NAME" in refused("push", checkpoint(tmp_path / "d"), "name")
    assert hub.sent == 0


def test_file_too_large_for_the_hub(hub: Hub, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "c")
    with (folder / "large.bin").open("wb") as f:
        f.truncate(46_000_000_000)  # a hole: no byte is on the disk
    said = refused("push", folder, "org/new")
    assert "46.0 GB" in said
    assert "shard_size" in said
    assert hub.sent == 0


def test_killed_anywhere_and_run_again(hub: Hub, tmp_path: Path) -> None:
    """Killed when the server has seen so many requests; the last run ends with a repository like any other."""
    folder = checkpoint(tmp_path / "c")
    hub.slow = 0.01
    code = (
        "import sys; from pathlib import Path; from quantkit.export.hub import open_repo;"
        "from quantkit.export.push import push_folder; push_folder(Path(sys.argv[1]), open_repo('org/new'))"
    )
    chosen = random.Random(0)
    killed = 0
    for point in sorted(chosen.sample(range(2, 26), int(os.environ.get("QUANTKIT_KILLS", "8")))):
        hub.asked.clear()
        command = [sys.executable, "-c", code, str(folder)]
        client = subprocess.Popen(
            command, env=environment(hub, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while client.poll() is None and len(hub.asked) < point:
            time.sleep(0.002)
        time.sleep(chosen.random() * 0.02)
        killed += client.poll() is None
        client.send_signal(signal.SIGKILL)
        client.wait()
        held = hub.repos["org/new"].files() if "org/new" in hub.repos else {}
        assert "config.json" not in held or held == contents(folder), f"loadable by half at request {point}"
        if held == contents(folder) or point % 2:  # start over, or go on from what the last one left
            hub.repos.clear()
            hub.objects.clear()
            (folder / ".quantkit-push.json").unlink(missing_ok=True)
    assert killed >= 4, "most runs were killed before their end"
    hub.slow = 0.0
    status, said = quantkit("push", folder, "org/new")
    assert status == 0, said
    assert {n: sha256(d) for n, d in hub.repos["org/new"].files().items()} == {
        n: sha256(d) for n, d in contents(folder).items()
    }

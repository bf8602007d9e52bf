"""A small Hub in memory for the real client of huggingface_hub, with faults on request. Shares no code with quantkit.

    repositories, branches, pull requests    POST /api/repos/create, /api/models/ID/branch/NAME, .../commit/REV?create_pr=1
    files                                    GET /api/models/ID/tree/REV, /ID/resolve/REV/FILE (with Range)
    uploads                                  preupload, LFS batch (basic; parts above `part_bytes`), PUT, verify, commit

A fault waits for requests of one method whose path matches, lets `after` of them pass, and then hits `times`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_secretOfTheTests0123456789abcdefgh"
READ_ONLY = "hf_readOnlyOfTheTests0123456789abcdef"
INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


@dataclass
class Fault:
    """`kind` is an HTTP status, "reset" (the connection, in the middle of a body), "lost" (reset once the request was
    carried out) or "corrupt" (other bytes stored)."""

    kind: str
    method: str
    path: str
    times: int = 1
    after: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""


@dataclass
class Repository:
    private: bool
    branches: dict[str, dict[str, bytes]]
    commits: list[tuple[str, str, list[str]]] = field(default_factory=list)  # revision, summary, names

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """The files that people put there."""
        return {n: d for n, d in self.branches[revision].items() if n not in INITIAL}


@dataclass
class Hub:
    """State of the server. `asked` logs "METHOD path"; `sent` counts bytes of LFS bodies received, `served` those of files."""

    repos: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    sent: int = 0
    served: int = 0
    part_bytes: int = 1 << 40
    lock: threading.RLock = field(default_factory=threading.RLock)
    url: str = ""
    slow: float = 0.0  # seconds per 64 KiB of a body

    def add(self, repo_id: str, files: dict[str, bytes] | None = None, *, private: bool = False) -> Repository:
        """A repository with these files on main."""
        self.repos[repo_id] = Repository(private, {"main": {**INITIAL, **(files or {})}})
        return self.repos[repo_id]

    def add_folder(self, repo_id: str, folder: Path) -> Repository:
        """A repository with the files of a folder."""
        return self.add(repo_id, {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()})

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method == method and re.search(fault.path, path) and fault.times > 0:
                    if fault.after > 0:
                        fault.after -= 1
                        return None
                    fault.times -= 1
                    return fault
        return None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob(data: bytes) -> str:
    return hashlib.sha1(b"blob " + str(len(data)).encode() + b"\0" + data).hexdigest()


def is_lfs(name: str, size: int) -> bool:
    return name.endswith((".safetensors", ".bin")) or size > 10_000_000


def commit_id(repo: Repository, revision: str) -> str:
    state = sorted((n, sha256(d)) for n, d in repo.branches[revision].items())
    return hashlib.sha1(json.dumps(state).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    lost = False

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_request()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    # ---- requests ----

    def handle_request(self) -> None:
        parts = urlsplit(self.path)
        self.route, self.query = unquote(parts.path), parse_qs(parts.query)
        self.hub.asked.append(f"{self.command} {self.route}")
        fault = self.hub.fault(self.command, self.route)
        length = int(self.headers.get("Content-Length") or 0)
        if fault is not None and fault.kind == "reset":
            self.rfile.read(length // 2)
            self.reset()
            return
        body = self.read_body(length)
        self.lost = fault is not None and fault.kind == "lost"
        if fault is not None and fault.kind not in ("corrupt", "lost"):
            message = fault.message.replace("{authorization}", self.headers.get("Authorization", ""))
            self.answer(int(fault.kind), {"error": message or "a fault"}, fault.headers)
            return
        if fault is not None and fault.kind == "corrupt":
            body = bytes([body[0] ^ 1]) + body[1:]
        with self.hub.lock:
            self.dispatch(body)

    def reset(self) -> None:
        """Close without a FIN: the client sees a reset."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def read_body(self, length: int) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        found = bytearray()
        while len(found) < length:
            piece = self.rfile.read(min(1 << 16, length - len(found)))
            if not piece:
                break
            found += piece
            if self.hub.slow:
                time.sleep(self.hub.slow)
        return bytes(found)

    def dispatch(self, body: bytes) -> None:
        if m := re.fullmatch(r"/lfs/([0-9a-f]{64})(?:/(\d+))?", self.route):
            self.store(m[1], body, int(m[2]) if m[2] else None)
        elif self.command in ("GET", "HEAD") and (
            m := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.route)
        ):
            self.resolve(m[1], m[2], m[3])
        elif self.headers.get("Authorization") not in (f"Bearer {TOKEN}", f"Bearer {READ_ONLY}", None):
            self.answer(401, {"error": "Invalid credentials"})
        elif self.route == "/api/repos/create":
            self.create(json.loads(body))
        elif self.route == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif m := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self.route):
            self.batch(json.loads(body))
        elif m := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([^/]+)(?:/(.+))?)?", self.route):
            self.model(m[1], m[2] or "", m[3] or "main", body)
        elif self.route == "/lfs-verify":
            asked = json.loads(body)
            self.answer(200 if len(self.hub.objects.get(asked["oid"], b"")) == asked["size"] else 422, {})
        elif m := re.fullmatch(r"/lfs-complete/([0-9a-f]{64})", self.route):
            count = len(json.loads(body)["parts"])
            self.hub.objects[m[1]] = b"".join(self.hub.parts[m[1], i + 1] for i in range(count))
            self.answer(200, {})
        else:
            self.answer(404, {"error": f"no such endpoint: {self.command} {self.route}"})

    # ---- repositories ----

    def may_write(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.hub.url}/{name}"
        if not self.may_write():
            self.answer(403, {"error": "You don't have the rights to create a model under this namespace"})
        elif name in self.hub.repos:
            self.answer(409, {"error": "You already created this model repo", "url": url})
        else:
            self.hub.add(name, private=asked.get("visibility") == "private")
            self.answer(200, {"url": url})

    def model(self, repo_id: str, what: str, revision: str, body: bytes) -> None:
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif what == "branch":
            new = revision not in repo.branches
            repo.branches.setdefault(revision, dict(INITIAL))  # the first commit: the only starting point asked for
            self.answer(201 if new else 409, {} if new else {"error": "Reference already exists"})
        elif revision not in repo.branches and revision != commit_id(repo, "main"):
            self.answer(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
        elif what in ("", "revision"):
            names = [{"rfilename": n} for n in sorted(repo.branches.get(revision, repo.branches["main"]))]
            info = {"id": repo_id, "modelId": repo_id, "sha": commit_id(repo, "main"), "siblings": names, "tags": []}
            self.answer(200, {**info, "private": repo.private})
        elif what == "tree":
            self.answer(200, self.tree(repo.branches.get(revision, repo.branches["main"])))
        elif what == "commits":
            commit = {"id": "0" * 40, "title": "initial commit", "message": "", "authors": []}
            self.answer(200, [{**commit, "date": "2026-01-01T00:00:00.000Z"}])
        elif not self.may_write():
            self.answer(403, {"error": "Forbidden: you must have write access"})
        elif what == "preupload":
            held = repo.branches[revision]
            self.answer(200, {"files": [self.mode(f, held.get(f["path"])) for f in json.loads(body)["files"]]})
        elif what == "commit":
            self.commit(repo, repo_id, revision, [json.loads(line) for line in body.splitlines()])
        else:
            self.answer(404, {"error": f"no such endpoint: {self.route}"})

    def mode(self, file: dict[str, Any], held: bytes | None) -> dict[str, Any]:
        lfs = is_lfs(file["path"], file["size"])
        oid = None if held is None else sha256(held) if lfs else blob(held)
        mode = "lfs" if lfs else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def tree(self, files: dict[str, bytes]) -> list[dict[str, Any]]:
        found = []
        for name, data in sorted(files.items()):
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": blob(data)}
            if is_lfs(name, len(data)):
                entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
            found.append(entry)
        return found

    def commit(self, repo: Repository, repo_id: str, revision: str, lines: list[dict[str, Any]]) -> None:
        pull = "create_pr" in self.query
        new = dict(repo.branches[revision])
        names = []
        for line in lines[1:]:
            value = line["value"]
            names.append(("-" if line["key"] == "deletedFile" else "") + value["path"])
            if line["key"] == "deletedFile":
                if value["path"] not in new:
                    self.answer(400, {"error": f"{value['path']} is not there, so it cannot be deleted"})
                    return
                del new[value["path"]]
            elif line["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif value["oid"] not in self.hub.objects:
                self.answer(400, {"error": f"the LFS object {value['oid']} was never uploaded"})
                return
            else:
                new[value["path"]] = self.hub.objects[value["oid"]]
        if pull:
            revision = f"refs/pr/{sum(b.startswith('refs/pr/') for b in repo.branches) + 1}"
        repo.branches[revision] = new
        repo.commits.append((revision, lines[0]["value"]["summary"], names))
        oid = commit_id(repo, revision)
        url = f"{self.hub.url}/{repo_id}/discussions/{revision.rsplit('/', 1)[1]}" if pull else None
        self.answer(
            200,
            {
                "commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}",
                "commitOid": oid,
                "success": True,
                **({"pullRequestUrl": url} if pull else {}),
            },
        )

    # ---- large files ----

    def batch(self, asked: dict[str, Any]) -> None:
        if not self.may_write():
            self.answer(403, {"error": "Forbidden"})
            return
        objects = []
        for item in asked["objects"]:
            oid, size = item["oid"], item["size"]
            entry: dict[str, Any] = {"oid": oid, "size": size}
            if oid not in self.hub.objects or sha256(self.hub.objects[oid]) != oid:
                upload: dict[str, Any] = {"href": f"{self.hub.url}/lfs/{oid}", "header": {}}
                if size > self.hub.part_bytes:
                    count = -(-size // self.hub.part_bytes)
                    urls = {str(i + 1): f"{self.hub.url}/lfs/{oid}/{i + 1}" for i in range(count)}
                    header = {"chunk_size": str(self.hub.part_bytes), **urls}
                    upload = {"href": f"{self.hub.url}/lfs-complete/{oid}", "header": header}
                entry["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/lfs-verify"}}
            objects.append(entry)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str, body: bytes, part: int | None) -> None:
        self.hub.sent += len(body)
        if part is None:
            self.hub.objects[oid] = body
        else:
            self.hub.parts[oid, part] = body
        self.answer(200, {}, {"ETag": f'"{sha256(body)[:16]}"'})

    def resolve(self, repo_id: str, revision: str, name: str) -> None:
        repo = self.hub.repos.get(repo_id)
        if repo is None or name not in repo.branches.get(revision, repo.branches["main"]):
            code = "RepoNotFound" if repo is None else "EntryNotFound"
            self.answer(404, {"error": "not found"}, {"X-Error-Code": code})
            return
        data = repo.branches.get(revision, repo.branches["main"])[name]
        headers = {"ETag": f'"{sha256(data)}"', "X-Repo-Commit": commit_id(repo, "main"), "Accept-Ranges": "bytes"}
        if m := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(m[1]), min(int(m[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data = data[first : last + 1]
        if self.command == "GET":
            self.hub.served += len(data)
        self.answer(206 if "Content-Range" in headers else 200, data, headers)

    def answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        if self.lost:
            self.reset()
            return
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        if not isinstance(content, bytes) and status >= 400 and "error" in content:
            headers = {"X-Error-Message": content["error"], **(headers or {})}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A Hub that answers at `url` until the end of the block."""
    hub = Hub()

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A killed client leaves broken connections behind."""

    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()

"""One branch of a repository on the Hub, through huggingface_hub: what it holds, what is sent to it, what went wrong.

The client retries requests of the storage for half a minute, and not at all those that make repositories, branches and
commits. `patiently` covers both, within bounds: an upload of hours survives a network that is away for some minutes.
The token is the client's; it is read here only to keep it out of messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from quantkit.kernels.errors import QuantkitError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

T = TypeVar("T")
TRIES = 6
LONGEST_WAIT = 300.0  # seconds, of a Retry-After too: the Hub's limits are per five minutes
TRANSIENT = (408, 429, 500, 502, 503, 504)
GO_ON = "what was sent stays on the Hub: run the same command again to go on"


@dataclass(frozen=True, slots=True)
class Held:
    """A file on the Hub. `digest` is the SHA-256 of its bytes where `lfs`, else the SHA-1 of its git blob."""

    size: int
    digest: str
    lfs: bool


@dataclass(slots=True)
class Repo:
    """`revision` is a branch or `refs/pr/N`; with `create_pr` the first commit opens a pull request and moves there."""

    api: HfApi
    id: str
    revision: str
    create_pr: bool

    @property
    def url(self) -> str:
        """Where people find it."""
        return f"{self.api.endpoint}/{self.id}" + ("" if self.revision == "main" else f"/tree/{self.revision}")

    def files(self) -> dict[str, Held]:
        """Every file, without `.gitattributes`: the Hub itself writes that one."""
        from huggingface_hub.hf_api import RepoFile

        def listed() -> dict[str, Held]:
            tree = self.api.list_repo_tree(self.id, recursive=True, revision=self.revision)
            return {
                f.path: Held(f.size, f.lfs.sha256 if f.lfs else f.blob_id, f.lfs is not None)
                for f in tree
                if isinstance(f, RepoFile) and f.path != ".gitattributes"
            }

        return patiently(listed, self.id)

    def upload(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Bring large files into the Hub's storage, a few at a time; nobody sees them before `commit`."""
        patiently(
            lambda: self.api.preupload_lfs_files(
                self.id, additions, revision=self.revision, create_pr=self.create_pr, num_threads=len(additions),
                free_memory=False,
            ),
            self.id,
        )  # fmt: skip

    def commit(self, additions: Sequence[CommitOperationAdd], deletions: Sequence[str], message: str) -> None:
        """One commit of files (sent first where `upload` has not) and deletions."""
        from huggingface_hub import CommitInfo, CommitOperationDelete

        def once() -> CommitInfo:
            held = self.files() if deletions else {}  # a try whose answer was lost may have removed them
            gone = [CommitOperationDelete(n) for n in deletions if n in held]
            return self.api.create_commit(
                self.id, [*gone, *additions], commit_message=message, revision=self.revision, create_pr=self.create_pr
            )

        info = patiently(once, self.id, repeatable=not self.create_pr)
        if self.create_pr and info.pr_revision is not None:
            self.revision, self.create_pr = info.pr_revision, False


def open_repo(repo_id: str, *, private: bool = False, revision: str | None = None, create_pr: bool = False) -> Repo:
    """The repository, made if it does not exist, and the branch, made from the first commit (so without files).

    Raises QuantkitError: no token, no right to write, `private` for a repository that is public, a bad name.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise QuantkitError(
            "no token for the Hub",
            value=repo_id,
            hint="set HF_TOKEN, or log in with `hf auth login`; it needs the right to write",
        )
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise QuantkitError("not a name of a repository", value=repo_id, allowed="ORG/NAME")
    api = HfApi(library_name="quantkit")
    repo = Repo(api, repo_id, revision or "main", create_pr)
    patiently(lambda: api.create_repo(repo_id, private=private or None, exist_ok=True), repo_id)
    if private and not patiently(lambda: api.model_info(repo_id), repo_id).private:
        raise QuantkitError(
            "the repository is public",
            value=repo_id,
            allowed="a private one",
            hint="leave --private out, or make it private first",
        )
    if revision not in (None, "main") and not repo.revision.startswith("refs/"):
        first = patiently(lambda: api.list_repo_commits(repo_id), repo_id)[-1].commit_id
        patiently(lambda: api.create_branch(repo_id, branch=repo.revision, revision=first, exist_ok=True), repo_id)
    return repo


def patiently(call: Callable[[], T], repo_id: str, *, repeatable: bool = True) -> T:
    """Call, and again when the Hub is busy, fails or cannot be reached; raises QuantkitError that says what to do.

    A call that is not `repeatable` is made again only if the Hub has said that it did nothing.
    """
    import httpx

    wait = 1.0
    for left in range(TRIES - 1, -1, -1):
        try:
            return call()
        except (httpx.HTTPError, OSError, RuntimeError, ValueError) as e:
            inner = _inner(e)
            asked = _retry_after(inner)
            again = _may_pass(inner) if repeatable else _status(inner) in (429, 503)
            if not left or not again or (asked or 0) > LONGEST_WAIT:
                raise _explained(inner, repo_id) from e
        time.sleep(wait if asked is None else asked + 1)
        wait *= 2
    raise AssertionError("the last try returns or raises")


def _inner(error: BaseException) -> BaseException:
    """The error of the request or of a file, which the client wraps when it uploads."""
    from httpx import HTTPError

    at: BaseException | None = error
    while at is not None and not isinstance(at, HTTPError | OSError):
        at = at.__cause__
    return at or error


def _status(error: BaseException) -> int | None:
    """The HTTP status, if the Hub answered."""
    answer = getattr(error, "response", None)
    return None if answer is None else int(answer.status_code)


def _may_pass(error: BaseException) -> bool:
    """True for what a second try may mend. A bare RuntimeError is the Xet client's, which does not say more."""
    from httpx import TransportError

    return _status(error) in TRANSIENT or isinstance(error, TransportError | RuntimeError)


def _retry_after(error: BaseException) -> float | None:
    answer = getattr(error, "response", None)
    text = answer.headers.get("Retry-After", "") if answer is not None else ""
    return float(text) if text.isdigit() else None


def _explained(error: BaseException, repo_id: str) -> QuantkitError:
    """What a person can do about it. The token is cut out, should the Hub have repeated it."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[:2]).replace(get_token() or "\0", "***")
    status = _status(error)
    if isinstance(error, RevisionNotFoundError):
        return QuantkitError("no such branch or pull request on the Hub", value=repo_id, hint=said)
    if status == 401 or isinstance(error, RepositoryNotFoundError):
        return QuantkitError(
            "the Hub does not accept the token for this repository", value=repo_id, hint="check the name and HF_TOKEN"
        )
    if status == 403:
        return QuantkitError("the token has no right to write to this repository", value=repo_id, hint=said)
    what = "the Hub cannot be reached, or does not answer" if _may_pass(error) else "the upload failed"
    return QuantkitError(what, value=f"{repo_id}: {said}", hint=GO_ON)

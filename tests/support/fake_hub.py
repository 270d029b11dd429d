"""A small Hugging Face Hub on this machine: the routes that huggingface_hub uses.

It stands in for the real one, which no test may reach: repositories with commits and branches,
files by range, commits of small files, and the errors of a repository that is missing, private,
gated, closed to a token, or changed by others meanwhile.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import HfFileSystem, constants
from huggingface_hub.utils import close_session
from servers import serving

_API = re.compile(
    r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info|preupload|commit)/([^/]+)/?(.*))?"
)
_FILE = re.compile(r"(/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
Files = Mapping[str, bytes]


@dataclass
class FakeHub:
    """Repositories by `models/ORG/NAME` or `datasets/ORG/NAME`."""

    url: str = ""
    commits: dict[str, dict[str, Files]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)  # to writers
    conflicts: int = 0  # commits that are refused, because others committed
    private: set[str] = field(default_factory=set)  # made so

    def push(self, repo: str, files: Files, branch: str = "main") -> str:
        """The new commit of the branch, which holds these files."""
        content = json.dumps([repo, len(self.commits.get(repo, {})), branch])
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits.setdefault(repo, {})[commit] = dict(files)
        self.branches.setdefault(repo, {})[branch] = commit
        return commit

    def files(self, repo: str, revision: str) -> tuple[str, Files]:
        """The commit and its files; KeyError without such a repository or revision."""
        commit = self.branches[repo].get(revision, revision)
        return commit, self.commits[repo][commit]


def _entry(path: str, data: bytes) -> dict[str, Any]:
    """A file as the Hub lists it; weights are in LFS, whose SHA-256 is listed."""
    oid = hashlib.sha1(data).hexdigest()
    own = {"type": "file", "path": path, "size": len(data), "oid": oid}
    if path.endswith(".safetensors"):
        digest = hashlib.sha256(data).hexdigest()
        own["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    return own


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    """The same file as the Hub describes it with its repository."""
    entry = _entry(path, data)
    lfs = {**entry["lfs"], "sha256": entry["lfs"]["oid"]} if "lfs" in entry else None
    return {"rfilename": path, "size": len(data), "blobId": entry["oid"], "lfs": lfs}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if path == "/api/validate-yaml":
            self._send(200, b'{"errors": [], "warnings": []}')
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif match := _API.fullmatch(path):
            kind, name, operation, revision, below = match.groups()
            self._api(f"{kind}/{name}", operation, revision or "main", below or "", body)
        elif match := _FILE.fullmatch(path):
            dataset, name, revision, below = match.groups()
            self._file(f"{'datasets' if dataset else 'models'}/{name}", revision, below)
        else:
            self._send(404, b"{}")

    do_HEAD = do_POST = do_GET

    def _at_revision(self, repo: str, revision: str) -> tuple[str, Files] | None:
        if repo not in self.hub.commits:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return None
        try:
            return self.hub.files(repo, revision)
        except KeyError:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return None

    def _api(
        self, repo: str, operation: str | None, revision: str, below: str, body: bytes
    ) -> None:
        if (at_revision := self._at_revision(repo, revision)) is None:
            return
        commit, files = at_revision
        if operation in ("preupload", "commit"):
            self._write(repo, operation, revision, files, body)
            return
        if operation == "tree":
            inside = {p: d for p, d in files.items() if not below or p.startswith(f"{below}/")}
            if below and not inside:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            value: Any = [_entry(p, d) for p, d in inside.items()]
            if "recursive" not in self.path or "recursive=false" in self.path.lower():
                value = _one_level(below, inside)
        elif operation == "paths-info":
            as_json = body.startswith(b"{")
            asked = json.loads(body)["paths"] if as_json else parse_qs(body.decode())["paths"]
            value = [_entry(p, files[p]) for p in asked if p in files]
            value += [
                {"type": "directory", "path": p, "oid": "0"}
                for p in asked
                if p not in files and any(each.startswith(f"{p}/") for each in files)
            ]
        else:
            siblings = [_sibling(p, d) for p, d in files.items()]
            value = {"id": repo.partition("/")[2], "sha": commit, "siblings": siblings, "tags": []}
        self._send(200, json.dumps(value).encode())

    def _create(self, asked: Mapping[str, Any]) -> None:
        repo = f"datasets/{asked['organization']}/{asked['name']}"
        is_new = repo not in self.hub.commits
        if is_new:
            self.hub.push(repo, {})
            if asked.get("private") or asked.get("visibility") == "private":
                self.hub.private.add(repo)
        self._send(200 if is_new else 409, json.dumps({"url": f"{self.hub.url}/{repo}"}).encode())

    def _write(self, repo: str, operation: str, branch: str, files: Files, body: bytes) -> None:
        if repo in self.hub.closed:
            self._send(403, b'{"error": "you may not write"}')
            return
        if operation == "preupload":
            named = [file["path"] for file in json.loads(body)["files"]]
            answers = [
                {
                    "path": path,
                    "uploadMode": "regular",
                    "shouldIgnore": False,
                    "oid": _git_hash(files[path]) if path in files else None,
                }
                for path in named
            ]
            self._send(200, json.dumps({"files": answers}).encode())
            return
        if self.hub.conflicts:
            self.hub.conflicts -= 1
            self._send(412, b'{"error": "a commit has happened since"}')
            return
        after = dict(files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                after[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del after[value["path"]]
        commit = self.hub.push(repo, after, branch)
        url = f"{self.hub.url}/{repo}/commit/{commit}"
        answer = {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""}
        self._send(200, json.dumps(answer).encode())

    def _file(self, repo: str, revision: str, path: str) -> None:
        if (at_revision := self._at_revision(repo, revision)) is None:
            return
        commit, files = at_revision
        if repo in self.hub.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        if path not in files:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        data, status = files[path], 200
        entry = _entry(path, data)
        etag = entry.get("lfs", entry)["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(asked[1]), int(asked[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{min(end, len(data) - 1)}/{len(data)}"
            data, status = data[start : end + 1], 206
        self._send(status, data, headers)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _one_level(below: str, files: Files) -> list[dict[str, Any]]:
    start = len(below) + 1 if below else 0
    folders = {path[: path.index("/", start)] for path in files if "/" in path[start:]}
    direct = [_entry(path, data) for path, data in files.items() if "/" not in path[start:]]
    return [*({"type": "directory", "path": path, "oid": "0"} for path in sorted(folders)), *direct]


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What HF_ENDPOINT does when huggingface_hub is imported."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(HfFileSystem, "_cache", {})  # instances with another endpoint


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub without repositories, which huggingface_hub uses as the real one."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    hub = FakeHub()
    with serving(_Handler, hub=hub) as hub.url:
        use_endpoint(monkeypatch, hub.url)
        yield hub
        close_session()  # before the server ends: it waits for its connections

"""A Hugging Face Hub on this machine: it answers what huggingface_hub asks of a model, and refuses as the Hub does.

The shapes (headers, `X-Error-Code`, the fields of a model's description) are those that huggingface_hub reads:
utils/_http.py `hf_raise_for_status`, file_download.py `get_hf_file_metadata`, hf_api.py `ModelInfo`.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """One model's repository, at one commit."""

    files: dict[str, bytes]
    gated: bool = False
    refuse: tuple[int, str, str] | None = None
    """Status, X-Error-Code and X-Error-Message of every answer."""
    hang_at: str = ""
    """A request whose path ends so gets no answer."""
    lfs: frozenset[str] = frozenset()
    """Files that are sent from another host, as large ones are."""
    said_bytes: dict[str, int] = field(default_factory=dict)
    """Sizes that are not the files' own."""


@dataclass
class Hub:
    """Where it is, what it has, and what it was asked."""

    address: str
    repositories: dict[str, Repository]
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, Authorization) of each request."""
    hosts: set[str] = field(default_factory=set)
    """The names under which it was asked."""

    @property
    def environment(self) -> dict[str, str]:
        """What sends the client here."""
        return {"HF_ENDPOINT": self.address, "HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}


@contextmanager
def running(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """A hub with these repositories, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}", repositories)  # type: ignore[attr-defined]
    server.over = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.over.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def silent() -> Iterator[str]:
    """The address of something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a request."""
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        hub.asked.append((self.command, self.path, self.headers.get("Authorization", "")))
        hub.hosts.add(self.headers["Host"].partition(":")[0])
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        repository = hub.repositories.get(name)
        if repository is None:  # the Hub says the same of a private one
            self._refuse(401 if not self.headers.get("Authorization") else 404, "RepoNotFound", "Repository not found")
        elif repository.refuse:
            self._refuse(*repository.refuse)
        elif repository.hang_at and path.endswith(repository.hang_at):
            self.server.over.wait(120)  # type: ignore[attr-defined]
            self.close_connection = True
        elif parts[0] == "api":
            self._describe(name, repository, parts[5] if len(parts) > 5 else "main")
        else:
            self._file(repository, "/".join(parts[4:]))

    do_HEAD = do_GET

    def _describe(self, name: str, repository: Repository, revision: str) -> None:
        if revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        sizes = {file: repository.said_bytes.get(file, len(data)) for file, data in repository.files.items()}
        siblings = [{"rfilename": file, "size": size, "blobId": "0" * 40} for file, size in sizes.items()]
        said = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings}
        self._answer(200, json.dumps({**said, "gated": "manual" if repository.gated else False}).encode(), {})

    def _file(self, repository: Repository, name: str) -> None:
        if repository.gated:
            told = self.headers.get("Authorization")
            self._refuse(403 if told else 401, "GatedRepo", "Access to this model is restricted")
        elif name not in repository.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            data = repository.files[name]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            if name in repository.lfs and "localhost" not in self.headers["Host"]:
                linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"'}
                address = f"http://localhost:{self.server.server_port}{self.path}"  # type: ignore[attr-defined]
                self._answer(302, b"", {**headers, **linked, "Location": address})
            else:
                self._answer(200, data, headers)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(
            status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message}
        )

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

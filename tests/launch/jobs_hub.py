"""A Hub for tests: the part of huggingface.co's HTTP interface that Jobs need, as its client and documents have it.

https://huggingface.co/docs/huggingface_hub/guides/jobs: POST /api/jobs/NAMESPACE, GET .../ID, .../ID/logs as
server-sent events, POST .../ID/cancel, GET /api/jobs/hardware; besides whoami-v2, repositories and buckets.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_secretsecretsecret"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HARDWARE = [
    {
        "name": "cpu-basic",
        "prettyName": "CPU Basic",
        "cpu": "2 vCPU",
        "ram": "16 GB",
        "ephemeralStorage": "20 GB",
        "accelerator": None,
        "unitCostMicroUSD": 167,
        "unitCostUSD": 0.000167,
        "unitLabel": "minute",
    },
    {
        "name": "h200x8",
        "prettyName": "8x Nvidia H200",
        "cpu": "184 vCPU",
        "ram": "2048 GB",
        "ephemeralStorage": "24 TB",
        "accelerator": {"type": "gpu", "model": "H200", "quantity": "8", "vram": "141 GB", "manufacturer": "Nvidia"},
        "unitCostMicroUSD": 666667,
        "unitCostUSD": 0.666667,
        "unitLabel": "minute",
    },
]


@dataclass
class Hub:
    """What it has, and what it was asked."""

    url: str = ""
    stage: str = "COMPLETED"
    """What a Job comes to once its log is read."""
    message: str | None = None
    log: tuple[str, ...] = ("8",)
    slow: bool = False
    """Whether a log goes on until the Job is cancelled."""
    refuse: tuple[int, str] | None = None
    """Answer to a Job that is asked for."""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    posted: list[dict[str, Any]] = field(default_factory=list)
    repositories: dict[str, bool] = field(default_factory=dict)
    """By name, whether it is private."""
    files: dict[str, str] = field(default_factory=dict)
    buckets: dict[str, Any] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    """Files of the buckets."""
    asked: list[str] = field(default_factory=list)

    def job(self, body: dict[str, Any], owner: str) -> dict[str, Any]:
        """A Job as the interface shows it; values of secrets are never shown."""
        number = f"{len(self.jobs) + 1:024x}"
        shown = {key: value for key, value in body.items() if key not in ("secrets", "timeoutSeconds")}
        self.jobs[number] = {
            "id": number,
            "createdAt": "2026-11-30T12:00:00.000Z",
            **shown,
            "secrets": sorted(body.get("secrets", {})),
            "status": {"stage": "RUNNING", "message": None},
            "owner": {"id": "1", "name": owner, "type": "user"},
        }
        return self.jobs[number]


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def answer(self, value: object, code: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def allowed(self) -> bool:
        self.hub.asked.append(f"{self.command} {unquote(self.path)}")
        if self.path == "/api/jobs/hardware" or self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.body()
        self.answer({"error": "Invalid username or password."}, 401)
        return False

    def do_GET(self) -> None:
        if not self.allowed():
            return
        parts = urlsplit(self.path).path.strip("/").split("/")
        match parts:
            case ["api", "whoami-v2"]:
                self.answer({"type": "user", "name": "ada", "auth": {"accessToken": {"role": "write"}}})
            case ["api", "jobs", "hardware"]:
                self.answer(HARDWARE)
            case ["api", "jobs", _, job, "logs"] if job in self.hub.jobs:
                self.send_log(self.hub.jobs[job])
            case ["api", "jobs", _, job] if job in self.hub.jobs:
                self.answer(self.hub.jobs[job])
            case ["api", "jobs", _]:
                wanted = parse_qs(urlsplit(self.path).query)
                labels = [label.split("=", 1) for label in wanted.get("label", [])]
                self.answer(
                    [
                        job
                        for job in self.hub.jobs.values()
                        if job["status"]["stage"] in wanted.get("stage", [job["status"]["stage"]])
                        and all(job.get("labels", {}).get(name) == value for name, value in labels)
                    ]
                )
            case ["api", "buckets", owner, name, "tree", *_] if f"{owner}/{name}" not in self.hub.buckets:
                self.answer({"error": "Bucket not found"}, 404)
            case ["api", "buckets", _, _, "tree", *prefix]:
                start = unquote("/".join(prefix))
                found = sorted(name for name in self.hub.stored if name.startswith(start))
                self.answer([{"type": "file", "path": name, "size": 1, "xetHash": "0" * 64} for name in found])
            case _:
                self.answer({"error": "Job not found"}, 404)

    def send_log(self, job: dict[str, Any]) -> None:
        """Server-sent events, as the client reads them; the first says that the Job started, and is no log."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        lines = ("===== Job started at 2026-11-30 12:00:00 =====", *self.hub.log)
        try:
            for line in lines:
                event = json.dumps({"data": line, "timestamp": "2026-11-30T12:00:01Z"})
                self.wfile.write(f"event: log\ndata: {event}\n\n".encode())
                self.wfile.flush()
            while self.hub.slow and job["status"]["stage"] == "RUNNING":
                self.wfile.write(b": keep-alive\n\n")
                self.wfile.flush()
                time.sleep(0.1)
        except OSError:
            return
        if job["status"]["stage"] == "RUNNING":
            job["status"] = {"stage": self.hub.stage, "message": self.hub.message}
        self.close_connection = True

    def do_POST(self) -> None:
        if not self.allowed():
            return
        data = self.body()
        parts = urlsplit(self.path).path.strip("/").split("/")
        match parts:
            case ["api", "jobs", _, job, "cancel"] if job in self.hub.jobs:
                self.hub.jobs[job]["status"] = {"stage": "CANCELED", "message": None}
                self.answer({"id": job})
            case ["api", "jobs", owner]:
                if self.hub.refuse:
                    code, text = self.hub.refuse
                    self.answer({"error": text}, code)
                    return
                self.hub.posted.append(json.loads(data))
                self.answer(self.hub.job(json.loads(data), owner))
            case ["api", "repos", "create"]:
                said = json.loads(data)
                name = f"{said.get('organization') or 'ada'}/{said['name']}"
                self.hub.repositories[name] = said.get("visibility") == "private"
                self.answer({"url": f"{self.hub.url}/datasets/{name}", "id": name})
            case ["api", "buckets", owner, name]:
                self.hub.buckets[f"{owner}/{name}"] = json.loads(data)
                self.answer({"url": f"{self.hub.url}/buckets/{owner}/{name}", "id": f"{owner}/{name}"})
            case ["api", "datasets", _, _, "preupload", "main"]:
                files = json.loads(data)["files"]
                self.answer(
                    {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}
                )
            case ["api", "datasets", owner, name, "commit", "main"]:
                for line in data.decode().splitlines():
                    said = json.loads(line)
                    if said["key"] == "file":
                        text = base64.b64decode(said["value"]["content"]).decode()
                        self.hub.files[f"{owner}/{name}/{said['value']['path']}"] = text
                url = f"{self.hub.url}/datasets/{owner}/{name}/commit/{COMMIT}"
                self.answer({"commitUrl": url, "commitOid": COMMIT, "success": True})
            case _:
                self.answer({"error": f"no such thing: {self.path}"}, 404)


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A Hub on this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

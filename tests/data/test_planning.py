"""Which files a data set has, here and on a hub that speaks as the Hub does, and what is put down of them."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tokenized import a_dataset, make_root, moekit, plain, shard_bytes, write_description, write_texts

from moekit.data.places import load_plan
from moekit.data.planning import folder_of, make_plan, settle_plan
from moekit.data.sources import list_files
from moekit.problems import MoekitError


def names(*sources: Path | str, wanted: str | None = None) -> tuple[str, list[str]]:
    kind, files = list_files(map(str, sources), wanted)
    return kind, [Path(file.path).name for file in files]


def test_files_folders_and_patterns_in_the_order_of_their_paths_each_once(tmp_path: Path):
    for name in ("b/2.jsonl", "b/1.jsonl.gz", "a/3.jsonl", "a/.hidden.jsonl", "a/notes.txt", "c.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert names(tmp_path / "b", tmp_path / "a", tmp_path / "b" / "2.jsonl") == (
        "jsonl",
        ["3.jsonl", "1.jsonl.gz", "2.jsonl"],
    )
    assert names(tmp_path / "*" / "*.jsonl") == ("jsonl", ["3.jsonl", "2.jsonl"])
    assert names(tmp_path / "a" / "notes.txt", wanted="jsonl") == ("jsonl", ["notes.txt"])
    assert names(tmp_path, wanted="parquet") == ("parquet", ["c.parquet"])
    for sources, told in [
        ([tmp_path], "the sources hold both parquet and jsonl files"),
        ([tmp_path / "a" / "notes.txt"], "its name does not say what it is"),
        ([tmp_path / "a" / "none.jsonl"], "cannot be read: no such file or directory"),
        ([tmp_path / "*.xyz"], "no parquet or jsonl file is there"),
    ]:
        with pytest.raises(MoekitError, match=told):
            names(*sources)


def test_a_plan_is_read_as_it_was_written_and_what_is_none_is_refused(tmp_path: Path):
    root = make_root(tmp_path / "root")
    write_texts(tmp_path / "text", [["a"], ["b"]])
    plan = make_plan(a_dataset(tmp_path / "text", keep_fraction=0.5), root)
    folder = folder_of(root, "some")
    settle_plan(folder, plan)
    assert load_plan(folder) == plan
    settle_plan(folder, plan)
    folder.plan.write_text('{"name": "some"')
    with pytest.raises(MoekitError, match=r"plan\.json"):
        settle_plan(folder, plan)


def test_a_root_that_megatron_cannot_read_is_refused(tmp_path: Path):
    root = make_root(tmp_path / "a root")
    write_texts(tmp_path / "text", [["a"]])
    with pytest.raises(MoekitError, match="Megatron cannot read data in"):
        make_plan(a_dataset(tmp_path / "text"), root)


class _Datasets(BaseHTTPRequestHandler):
    """The calls of huggingface_hub's HfFileSystem: a repository, its tree, single paths, and ranges of a file."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    broken = False

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        rest = path.partition("/datasets/own/text")[2]
        if "/datasets/own/text" not in path:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api") and rest.startswith("/tree/main"):
            below = rest.removeprefix("/tree/main").strip("/")
            found = [self._described(name) for name in self.files if str(Path(name).parent) == (below or ".")]
            folders = {str(Path(name).parent) for name in self.files} if not below else ()
            found += [{"type": "directory", "path": folder, "oid": "0" * 40} for folder in sorted(folders)]
            self._answer(200, json.dumps(found).encode(), {})
        elif path.startswith("/api"):
            self._answer(200, json.dumps({"_id": "1", "id": "own/text", "sha": "0" * 40, "siblings": []}).encode(), {})
        elif self.broken:
            self._answer(500, b"", {})
        else:
            data = self.files[rest.partition("/main/")[2]]
            first, _, last = self.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
            part = data[int(first) : int(last or len(data)) + 1]
            said = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            self._answer(206, part, {"Content-Range": said, "ETag": '"x"', "X-Repo-Commit": "0" * 40})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = json.loads(asked)["paths"] if asked.startswith("{") else [
            one.partition("=")[2].replace("%2F", "/") for one in asked.split("&") if one.startswith("paths=")
        ]  # fmt: skip
        self._answer(200, json.dumps([self._described(one) for one in paths if one in self.files]).encode(), {})

    def _described(self, name: str) -> dict[str, object]:
        data = self.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Datasets]]:
    handler = type("Handler", (_Datasets,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield handler
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_files_on_the_hub(tmp_path: Path, hub: type[_Datasets], ending: str):
    root, texts = make_root(tmp_path / "root"), [["one", "two"], ["three", "", "four"]]
    paths = write_texts(tmp_path / "text", texts, ending)
    hub.files |= {f"data/{path.name}": path.read_bytes() for path in paths}
    description = write_description(tmp_path / "some.yaml", f"hf://datasets/own/text/data/*.{ending}")
    done = moekit(description, root)
    assert done.returncode == 0, done.stderr
    folder = folder_of(root, "some")
    assert shard_bytes(folder, "some", 0) == plain(root, ["one", "two", "three", "four"])
    plan = load_plan(folder)
    assert plan
    assert [file.path for file in plan.files] == [f"hf://datasets/own/text/data/{path.name}" for path in paths]
    hub.files[f"data/{paths[0].name}"] += b" "
    done = moekit(description, root)
    assert "1 input file is changed: `hf://datasets/own/text/data/000." in done.stderr
    assert done.returncode == 1


def test_a_hub_that_lacks_it_or_does_not_answer(tmp_path: Path, hub: type[_Datasets], monkeypatch: pytest.MonkeyPatch):
    root = make_root(tmp_path / "root")
    description = write_description(tmp_path / "some.yaml", "hf://datasets/own/other/data")
    done = moekit(description, root)
    assert done.stderr.startswith("hf://datasets/own/other/data: the Hub has no such data set or file")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    done = moekit(description, root)
    assert done.stderr.startswith("hf://datasets/own/other/data: the Hub ")
    assert "Traceback" not in done.stderr
    assert done.returncode == 1

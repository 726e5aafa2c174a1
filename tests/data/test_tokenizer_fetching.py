"""`moekit data tokenizer`, by the real huggingface_hub against a hub on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub import COMMIT, Hub, Repository, running, silent
from small import END, small_tokenizer

from moekit import share
from moekit.data.dataset import Dataset
from moekit.data.tokenizer import fetching as tokenizer_fetching
from moekit.data.tokenizer import hub as tokenizer_hub
from moekit.data.tokenizer.fetching import fetch_tokenizer
from moekit.problems import MoekitError

FILES = {
    "tokenizer.json": small_tokenizer().to_str().encode(),
    "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
    "special_tokens_map.json": b"{}",
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights" * 1000,
    "original/tokenizer.model": b"sentencepiece",
    "README.md": b"# card",
}
WANTED = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"}
DESCRIPTION = (
    "name: docs\nsource: x.parquet\ntokenizer: small\ntokenizer_source: ours/model\n"
    f"tokenizer_copy: ours/copy\nend_of_document: {END}\n"
)
TOKEN = "hf_averysecretwordthatisnevershown"


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No login of whoever runs this, no proxy on the way."""
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running({"ours/model": Repository(dict(FILES)), "ours/copy": Repository(dict(FILES))}) as hub:
        for name, value in hub.environment.items():
            monkeypatch.setenv(name, value)
        yield hub


def dataset(**changes: Any) -> Dataset:
    least = {"name": "docs", "source": ("/x.parquet",), "tokenizer": "small", "end_of_document": END}
    return Dataset(**{**least, "vocab_size": 302, "tokenizer_source": "ours/model", **changes})


def fetch(root: Path, given: str | None = None, **changes: Any) -> tokenizer_fetching.Fetched:
    return fetch_tokenizer(dataset(**changes), root, given, lambda _: None)


def refusal(root: Path, given: str | None = None, **changes: Any) -> str:
    """The message; nothing may be left, and no token be told."""
    before = {*(root / "tokenizers").rglob("*")}
    with pytest.raises(MoekitError) as refused:
        fetch(root, given, **changes)
    assert {*(root / "tokenizers").rglob("*")} <= before
    assert TOKEN not in str(refused.value)
    return str(refused.value)


# From the Hub


def test_only_what_is_needed_is_fetched(hub: Hub, tmp_path: Path) -> None:
    got = fetch(tmp_path)
    folder = tmp_path / "tokenizers/small"
    assert got.folder == folder
    assert not got.already
    assert {path.name for path in folder.iterdir()} == {*WANTED, "moekit.json"}
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    record = json.loads((folder / "moekit.json").read_text())
    assert (record["source"], record["commit"], record["revision"]) == ("ours/model", COMMIT, None)
    assert (record["vocab_size"], record["end_of_document_id"]) == (302, 301)
    assert record["sha256"] == got.facts.sha256
    assert sorted(path.name for path in folder.parent.iterdir()) == ["small"]
    assert not any("safetensors" in path for _, path, _ in hub.asked)


def test_the_same_again_asks_nobody_and_reads_no_tokenizer(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch(tmp_path)
    hub.asked.clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    began = time.perf_counter()
    again = fetch(tmp_path)
    assert time.perf_counter() - began < 0.1
    assert again.already
    assert again.facts == first.facts
    assert hub.asked == []


def test_the_revision_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    got = fetch(tmp_path, tokenizer_revision=COMMIT)
    assert any(f"/revision/{COMMIT}" in path for _, path, _ in hub.asked)
    assert got.record
    assert got.record.revision == COMMIT
    assert fetch(tmp_path, tokenizer_revision=COMMIT).already


def test_large_files_come_from_elsewhere_and_the_token_stays(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repositories["ours/model"].lfs = frozenset({"tokenizer.json"})
    assert fetch(tmp_path).facts.vocab_size == 302
    assert hub.hosts == {"127.0.0.1", "localhost"}
    sent = {(method, bool(told)) for method, path, told in hub.asked if path.endswith("/tokenizer.json")}
    assert sent == {("HEAD", True), ("GET", False)}


def test_no_such_revision(hub: Hub, tmp_path: Path) -> None:
    assert "`ours/model` has no revision `v9`" in refusal(tmp_path, tokenizer_revision="v9")


def test_gated_and_nobody(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["ours/model"].gated = True
    said = refusal(tmp_path, tokenizer_copy="ours/copy")
    assert "`ours/model` is gated on 127.0.0.1" in said
    assert "and you are not logged in" in said
    assert "hf auth login`; or `--from ours/copy` takes the copy that asks for no permission" in said
    assert fetch(tmp_path, "ours/copy", tokenizer_copy="ours/copy").record.source == "ours/copy"  # type: ignore[union-attr]
    assert fetch(tmp_path, tokenizer_copy="ours/copy").already


def test_gated_and_not_allowed(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["ours/model"].gated = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    said = refusal(tmp_path)
    assert "and your account has no access to it" in said
    assert "auth login" not in said
    assert any(authorization == f"Bearer {TOKEN}" for _, _, authorization in hub.asked)


def test_no_such_repository(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no repository `ours/modl`, or none that you may see" in refusal(tmp_path, tokenizer_source="ours/modl")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "has no repository `ours/modl`" in refusal(tmp_path, tokenizer_source="ours/modl")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, "", "Invalid credentials in Authorization header"), "does not take your token"),
        ((401, "", f"Token {TOKEN} is not known"), "127.0.0.1"),
        ((403, "", f"Forbidden for {TOKEN}"), "answers with status 403"),
        ((500, "", "Internal Error"), "answers with status 500"),
        ((200, "", "<html>Please log in to the guests' network</html>"), "is none of the Hub's"),
    ],
)
def test_the_hub_refuses(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str, str], said: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repositories["ours/model"].refuse = answer
    assert said in refusal(tmp_path)


def test_a_token_that_no_header_carries(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}ü")
    refusal(tmp_path)


def test_no_tokenizer_json(hub: Hub, tmp_path: Path) -> None:
    del hub.repositories["ours/model"].files["tokenizer.json"]
    said = refusal(tmp_path)
    assert (
        "`ours/model` has no `tokenizer.json`: it has config.json, special_tokens_map.json, tokenizer_config.j" in said
    )


def test_too_large(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["ours/model"].said_bytes["tokenizer.json"] = 1 << 40
    assert "has 1,099,511,627,8" in refusal(tmp_path)


def test_not_the_one_described(hub: Hub, tmp_path: Path) -> None:
    said = refusal(tmp_path, vocab_size=128_256)
    assert "tokenizer.json of ours/model: has 302 tokens, added ones included, and the description says 128,256" in said


# No network


def test_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with silent() as address:
        monkeypatch.setenv("HF_ENDPOINT", address.replace("//", f"//user:{TOKEN}@"))
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
        began = time.monotonic()
        said = refusal(tmp_path)
    assert time.monotonic() - began < 10
    assert f"error: {address[7:]} cannot be reached" in said
    assert "`--from DIR` takes a local folder" in said


def test_silent_when_a_file_is_asked_for(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["ours/model"].hang_at = "/tokenizer.json"
    monkeypatch.setattr(tokenizer_hub, "MOST_SECONDS", 3)
    assert "did not send `ours/model` within 3 s" in refusal(tmp_path)


def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "error: 127.0.0.1:9 cannot be reached: " in refusal(tmp_path)


def test_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids" in refusal(tmp_path)
    assert hub.asked == []


def test_no_client(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path/huggingface_hub.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)
    assert "needs `huggingface_hub`\n    hint: run `pip install 'moekit[data]'`" in refusal(tmp_path)


def test_disk_full(hub: Hub, tmp_path: Path) -> None:
    """In a mount namespace of its own, with a disk of some pages."""
    (tmp_path / "small").mkdir()
    (tmp_path / "docs.yaml").write_text(DESCRIPTION)
    script = 'mount -t tmpfs -o size=12k none small || exit 77; "$@"; code=$?; find small; exit $code'
    command = [sys.executable, "-m", "moekit", "data", "tokenizer", "docs.yaml", "--shared-root", "small"]
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, "bash", *command], cwd=tmp_path, capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip("mounting needs root")
    assert done.returncode == 1
    assert done.stderr.endswith("error: `ours/model` cannot be written: no space left on device\n"), done.stderr
    assert done.stdout.split() == ["small", "small/tokenizers"]


# From a folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere" / "files"
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        if "/" not in name:
            (folder / name).write_bytes(data)
    return folder


def test_a_folder_is_copied(folder: Path, tmp_path: Path) -> None:
    got = fetch(tmp_path, str(folder))
    assert {path.name for path in got.folder.iterdir()} == {*WANTED, "moekit.json"}
    assert got.record
    assert (got.record.source, got.record.commit) == (str(folder), None)
    assert fetch(tmp_path, tokenizer_source=str(folder)).already


def test_links_are_followed(folder: Path, tmp_path: Path) -> None:
    """As the client's cache has its snapshots."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    got = fetch(tmp_path, str(snapshot))
    assert not (got.folder / "tokenizer.json").is_symlink()


def test_no_folder_and_an_empty_one(tmp_path: Path) -> None:
    assert "cannot be read: no such file or directory" in refusal(tmp_path, "/nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no `tokenizer.json`" in refusal(tmp_path, str(tmp_path / "empty"))


def test_what_is_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is no `OWNER/NAME` and no local folder" in refusal(tmp_path, "--help")
    (tmp_path / "ours/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "write `./ours/model` for the folder" in refusal(tmp_path, "ours/model")


def test_no_source(tmp_path: Path) -> None:
    assert "says no `tokenizer_source`, and its tokenizer is not there" in refusal(tmp_path, tokenizer_source=None)


# There already


@pytest.fixture
def there(folder: Path, tmp_path: Path) -> Path:
    return fetch(tmp_path, str(folder), tokenizer_source=str(folder)).folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer_source": "ours/model"}, "it comes from `{folder}`, not from `ours/model`"),
        ({"tokenizer_source": "ours/model", "tokenizer_copy": "a/b"}, "not from `ours/model` or `a/b`"),
        ({"vocab_size": 5}, "has 302 tokens"),
        ({"end_of_document": "<|end|>"}, "has no token `<|end|>`"),
    ],
)
def test_another_is_asked_for(there: Path, folder: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said.format(folder=folder) in refusal(tmp_path, **{"tokenizer_source": str(folder), **changes})


def test_another_revision_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    fetch(tmp_path)
    assert fetch(tmp_path, tokenizer_revision=COMMIT).already
    assert f"it is revision `{COMMIT}`, not `v2`" in refusal(tmp_path, tokenizer_revision="v2")


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_file_was_changed_or_lost(there: Path, folder: Path, tmp_path: Path, name: str) -> None:
    with (there / name).open("ab") as file:
        file.write(b"\n")
    assert f"another tokenizer is there: `{name}` is not the one that was fetched" in refusal(tmp_path)
    (there / name).unlink()
    assert f"another tokenizer is there: `{name}` is missing" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"source": 1}', "\udcff"])
def test_the_record_was_damaged(there: Path, tmp_path: Path, text: str) -> None:
    (there / "moekit.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "its `moekit.json` is not what this moekit writes, or damaged" in refusal(tmp_path)


def test_put_there_by_other_means(there: Path, tmp_path: Path) -> None:
    (there / "moekit.json").unlink()
    got = fetch(tmp_path)
    assert got.already
    assert got.record is None
    assert got.facts.end_of_document_id == 301
    assert "it was put there by other means" in refusal(tmp_path, "ours/model")
    assert "has 302 tokens" in refusal(tmp_path, vocab_size=5)


def test_no_folder_at_all(tmp_path: Path) -> None:
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers/small").write_text("a file")
    assert "cannot put the tokenizer there: not a directory" in refusal(tmp_path)


# Several processes, ends


def start(root: Path, *more: str) -> subprocess.Popen[str]:
    description = root / "docs.yaml"
    description.write_text(DESCRIPTION)
    command = [sys.executable, "-m", "moekit", "data", "tokenizer", str(description), "--shared-root", str(root), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_at_once_fetch_once(hub: Hub, tmp_path: Path) -> None:
    both = [start(tmp_path) for _ in range(3)]
    said = [one.communicate(timeout=60) for one in both]
    assert [one.returncode for one in both] == [0, 0, 0]
    assert sum(" written, from ours/model at 0123456789ab\n" in out for out, _ in said) == 1
    assert sum(method == "GET" and path.endswith("/tokenizer.json") for method, path, _ in hub.asked) == 1
    assert [path.name for path in (tmp_path / "tokenizers").iterdir()] == ["small"]


def test_killed_on_the_way(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["ours/model"].hang_at = "/tokenizer.json"
    killed = start(tmp_path)
    deadline = time.monotonic() + 30
    while not any(path.endswith("/tokenizer.json") for _, path, _ in hub.asked):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int(Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()[0])
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    while Path(f"/proc/{child}/status").exists() and "Z (zombie)" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    hub.repositories["ours/model"].hang_at = ""
    out, err = start(tmp_path).communicate(timeout=60)
    assert " written, from ours/model" in out, err
    assert {path.name for path in (tmp_path / "tokenizers/small").iterdir()} == {*WANTED, "moekit.json"}
    assert [path.name for path in (tmp_path / "tokenizers").iterdir()] == ["small"]


def test_what_the_page_shows(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["meta-llama/Llama-3.2-1B"] = Repository(dict(FILES), gated=True)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    page = (share.PACKAGE.parent / "docs/datasets.md").read_text()
    (command, shown), *_ = re.findall(
        r"^\$ moekit (data tokenizer fineweb_edu)\n(.*?)^```", page, re.MULTILINE | re.DOTALL
    )
    words = [sys.executable, "-m", "moekit", *command.split(), "--shared-root", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stderr.replace(hub.address.removeprefix("http://"), "huggingface.co") == shown


def test_for_a_script(hub: Hub, tmp_path: Path) -> None:
    out, err = start(tmp_path, "--json").communicate(timeout=60)
    said = json.loads(out)
    assert (said["already"], said["source"], said["commit"], said["vocab_size"]) == (False, "ours/model", COMMIT, 302)
    assert err == "fetching the tokenizer of ours/model ...\n"

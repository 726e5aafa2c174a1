"""The making of a part in this process: silent, without a trace, and within its memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenized import make_root, write_texts

from moekit.data.quickstart import prepare_python_docs
from moekit.problems import MoekitError


def test_it_is_silent_leaves_no_process_and_does_not_touch_the_environment(tmp_path: Path):
    code = f"""
import glob, os
from pathlib import Path
from moekit.data.quickstart import prepare_python_docs
before = dict(os.environ)
prepare_python_docs(Path({str(tmp_path)!r}), lambda step: None)
assert dict(os.environ) == before
children = "".join(Path(file).read_text() for file in glob.glob("/proc/self/task/*/children"))
assert children == "", children
"""
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "python_docs.jsonl.gz: " in (tmp_path / "data" / "python-docs" / "tokenize.log").read_text()


@pytest.mark.parametrize("package", ["datatrove", "tokenizers", "orjson"])
def test_a_missing_package_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
):
    gone = {"datatrove", package}
    for module in [name for name in sys.modules if name.split(".")[0] in gone or name == "moekit.data.making.encoding"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(MoekitError) as refused:
        prepare_python_docs(tmp_path, lambda step: None)
    assert str(refused.value) == (
        f"error: preparing data needs `{package}`\n    hint: run `pip install 'moekit[data]'`"
    )


def test_importing_the_room_imports_none_of_the_heavy_packages():
    code = """
import sys, moekit.data.quickstart, moekit.data.making.here, moekit.data.shards, moekit.data.commands
heavy = {"datatrove", "tokenizers", "numpy", "torch", "loguru", "pyarrow"}
heavy &= {name.split(".")[0] for name in sys.modules}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


MEASURED = """
import sys
from pathlib import Path
from moekit.data.making.encoding import load_encoder, make_part
from moekit.data.planning import folder_of, make_plan
from tokenized import END, a_dataset
root, text = Path(sys.argv[1]), Path(sys.argv[2])
plan = make_plan(a_dataset(text), root)
encoder = load_encoder(root / "tokenizers" / "tiny" / "tokenizer.json", END)
part = make_part(plan, plan.files[0], encoder, root / "part", lambda step: None)
peak_kib = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])  # getrusage has its parent's
print(part.documents, part.tokens, peak_kib // 1024)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["50 MB", "one letter 20 million times", "many short"])
def test_odd_documents_fit_into_the_memory_of_a_worker(tmp_path: Path, kind: str):
    """`datasets/fineweb_edu.yaml` gives it 2 GiB. The text as a whole lies there a few times, besides its piece."""
    root = make_root(tmp_path / "root")
    texts = {
        "50 MB": ["before", "a few of many experts, and leave the others alone\n" * 10**6, "after"],
        "one letter 20 million times": ["a" * 20_000_000],
        "many short": ["a few of many experts"] * 300_000,
    }[kind]
    write_texts(tmp_path / "text", [texts], "parquet")
    words = [sys.executable, "-c", MEASURED, str(root), str(tmp_path / "text")]
    there = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(words, capture_output=True, text=True, env=there)
    assert done.returncode == 0, done.stderr
    documents, tokens, peak_mib = map(int, done.stdout.split())
    assert documents == len(texts)
    assert tokens > sum(map(len, texts)) // 40
    assert peak_mib < 1536

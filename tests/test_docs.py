"""What the documents show, run: YAML blocks load, console blocks print what they say, links and trees are real."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])
FENCE = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: Path, language: str) -> list[tuple[str, str]]:
    """(file name behind the language, text) of each fenced block."""
    return [(name, text) for kind, name, text in FENCE.findall(document.read_text()) if kind == language]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory like a user's: the shipped recipes below it, and the files that the README names."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for document in DOCUMENTS:
        for name, text in blocks(document, "yaml"):
            if name:
                (folder / name).write_text(text)
    return folder


CONSOLE = [
    (path.relative_to(ROOT), text)
    for path in DOCUMENTS
    for _, text in blocks(path, "console")
    if not text.startswith("$ make")
]


@pytest.mark.parametrize(("document", "text"), CONSOLE, ids=[text.splitlines()[0] for _, text in CONSOLE])
def test_console_blocks_print_what_they_show(document: Path, text: str, folder: Path) -> None:
    command, expected = re.match(r"\$ (.*?)\n(.*)", text, re.DOTALL).groups()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    shown = (run.stdout + run.stderr).replace(str(ROOT / "recipes"), "recipes")
    assert shown == expected


def test_readmes_recipe_is_the_shipped_one() -> None:
    from moekit.recipe import nodes

    (_, text), *_ = [block for block in blocks(ROOT / "README.md", "yaml") if not block[0]]
    shipped = (ROOT / "recipes/first_moe.yaml").read_text()
    assert plain(nodes.parse(text, "README.md", [])) == plain(nodes.parse(shipped, "first_moe.yaml", []))


def plain(node: object) -> object:
    from moekit.recipe import nodes

    if isinstance(node, nodes.Mapping):
        return {key: plain(value) for key, (_, value) in node.entries.items()}
    return node.text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_readmes_tree_is_the_real_one() -> None:
    (tree,) = re.findall(r"## The tree\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    named = set(re.findall(r"^  (\w+/)", tree, re.MULTILINE))
    real = {
        f"{path.name}/"
        for path in (ROOT / "moekit").iterdir()
        if path.is_dir() and path.name not in ("__pycache__", "share")
    }
    assert named == real
    top = set(re.findall(r"^(\w+/)", tree, re.MULTILINE)) | {"images/"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert top == {f"{Path(name).parts[0]}/" for name in tracked if "/" in name and not name.startswith(".")}


def test_every_make_target_and_recipe_the_readme_names_exists() -> None:
    text, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    from moekit.share import shipped_recipes

    table = text.partition("| shipped recipe |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([\w/]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:])))
    assert named <= set(shipped_recipes())
    assert {name for name in shipped_recipes() if not name.startswith("settings/")} <= named  # those: docs/recipes.md

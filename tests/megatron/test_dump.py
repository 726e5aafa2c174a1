"""Flag tables come from running the real parser."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moekit.megatron.dump import dump_table, format_table
from moekit.megatron.table import TABLES, read_table
from moekit.problems import MoekitError


@pytest.mark.megatron
def test_the_installed_megatron_gives_the_shipped_table() -> None:
    assert dump_table("installed") == (TABLES / "0.19.2.json").read_text(encoding="utf-8")


def test_text_and_table_are_the_same() -> None:
    for path in TABLES.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        table = read_table(text)
        assert format_table(table.version, table.source, table.entries) == text


def checkout(root: Path, arguments: str) -> Path:
    """A folder that looks like a Megatron-LM checkout with that arguments.py."""
    for folder, text in {"core": "", "training": ""}.items():
        package = root / "megatron" / folder
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(text)
    (root / "megatron" / "__init__.py").write_text("")
    (root / "megatron" / "core" / "package_info.py").write_text("__version__ = '9.9'\n")
    (root / "megatron" / "training" / "arguments.py").write_text(arguments)
    return root


def test_a_checkout_is_read_from_its_own_files(tmp_path: Path) -> None:
    arguments = (
        "def add_megatron_arguments(parser):\n"
        "    print('noise on standard output')\n"
        "    parser.add_argument_group('sizes').add_argument('--width', type=int, choices=[1, 2])\n"
    )
    assert dump_table(str(checkout(tmp_path, arguments))) == format_table(
        "9.9", "a Megatron-LM checkout", {"--width": {"group": "sizes", "type": "int", "choices": [1, 2]}}
    )


def test_what_is_no_megatron_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoekitError) as refused:
        dump_table(str(tmp_path / "none"))
    assert str(refused.value) == (
        f"error: `{tmp_path}/none` is not a directory\n    hint: give a Megatron-LM checkout, or `installed`"
    )
    with pytest.raises(MoekitError, match=r"holds no Megatron: it has no megatron/training/arguments\.py$"):
        dump_table(str(tmp_path))


def test_an_import_that_fails_names_the_last_line(tmp_path: Path) -> None:
    root = checkout(tmp_path, "import no_such_package\n")
    with pytest.raises(MoekitError) as refused:
        dump_table(str(root))
    assert str(refused.value) == (
        f"error: the Megatron of `{root}` does not import: ModuleNotFoundError: No module named 'no_such_package'\n"
        f"    hint: it was run with `{sys.executable}`"
    )


def test_a_python_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MoekitError, match=r"no-python` does not start: No such file or directory"):
        dump_table("installed", str(tmp_path / "no-python"))

"""The wheel: everything shipped travels in it and is found after `pip install`, without the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel unpacked as pip would, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True)
    (wheel,) = folder.glob("moekit-*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def moekit(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "moekit", *arguments],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_shipped_files_travel(installed: Path) -> None:
    for folder in ("recipes", "slurm", "images", "datasets"):
        ours = {p.relative_to(ROOT / folder) for p in (ROOT / folder).rglob("*") if p.is_file()}
        theirs = {
            p.relative_to(installed / "moekit/share" / folder)
            for p in (installed / "moekit/share" / folder).rglob("*")
            if p.is_file()
        }
        assert theirs == ours
    assert (installed / "moekit/data/python_docs/tokenizer/tokenizer.json").is_file()


def test_commands_find_them(installed: Path) -> None:
    checked = moekit(installed, "check", "first_moe", "settings/quickstart_dense")
    assert (checked.returncode, checked.stderr) == (
        0,
        "2 recipes: no problems, checked against aws-p5 (no --profile given)\n",
    )
    dry = moekit(installed, "launch", "first_moe", "--dry-run")
    assert dry.returncode == 0
    assert "==> train.sh <==" in dry.stdout
    assert str(ROOT) not in dry.stdout


def test_no_gpl_and_a_licence_for_all_texts(installed: Path) -> None:
    (metadata,) = installed.glob("moekit-*.dist-info")
    assert (metadata / "licenses/LICENSE").read_text().lstrip().startswith("Apache License")
    assert "PSF LICENSE AGREEMENT" in (metadata / "licenses/moekit/data/python_docs/LICENSE").read_text()

from pathlib import Path

import pytest
from cases import HERE


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which cases are written; `bases` and `profiles` are those of the rules' tests."""
    for name in ("bases", "profiles"):
        (tmp_path / name).symlink_to(HERE / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path

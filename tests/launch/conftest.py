from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from moekit.recipe.load import Loaded, load

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Mapping[str, str]], None]:
    """Compare texts with those kept in a folder below golden/: the same files, each byte for byte."""

    def compare(name: str, texts: Mapping[str, str]) -> None:
        folder = GOLDEN / name
        if request.config.getoption("--update-golden"):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                path.unlink()
            for file, text in texts.items():
                (folder / file).write_text(text)
        assert folder.is_dir(), f"{folder} is missing: pytest --update-golden writes it"
        assert texts == {path.name: path.read_text() for path in folder.iterdir()}

    return compare


@pytest.fixture
def recipe_of(tmp_path: Path) -> Callable[..., Loaded]:
    """A recipe named `changed`: first_moe with sections of YAML over it."""

    def write(text: str = "", base: str = "first_moe") -> Loaded:
        path = tmp_path / "changed.yaml"
        path.write_text(f"base: {base}\n{text}")
        return load(str(path))

    return write

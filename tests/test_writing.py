"""What a command writes for its user is there whole, or not at all."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moekit.problems import MoekitError
from moekit.writing import write_new, write_whole


@contextmanager
def no_room() -> Iterator[None]:
    """Files can be made, and nothing written into them, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_new_file_takes_no_name_without_its_text(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    with no_room(), pytest.raises(MoekitError) as refused:
        write_new(path, "base: first_moe\n", "")
    assert str(refused.value) == f"error: cannot write `{path}`: file too large"
    assert list(tmp_path.iterdir()) == []
    write_new(path, "base: first_moe\n", "")
    with pytest.raises(MoekitError, match="exists"):
        write_new(path, "base: dense\n", "choose another name")
    assert path.read_text() == "base: first_moe\n"


def test_a_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    write_whole(path, "old")
    with no_room(), pytest.raises(MoekitError, match="cannot write"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"

"""The names that a refusal is about, from the source of the line that raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from moekit.megatron.names import names_at

SOURCE = """
def validate(args, world_size):
    assert args.min_lr <= args.lr
    if args.use_it:
        if args.optimizer == "x" or getattr(args, "load", None):
            raise ValueError(f"no {args.scale}")
        elif args.other:
            assert args.name(), "never"
        else:
            raise ValueError("neither")
    size = args.tensor_size * world_size
    half = size // 2
    if (
        half
        > args.limit
    ):
        for name in ("a", "b"):
            with open(name):
                raise ValueError("too large")

class Config:
    def __post_init__(self):
        try:
            if self.config.layers and self.model_config.rope: raise ValueError("both")
        except KeyError:
            raise RuntimeError(self.reason)
        return lambda: self.later
"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("assert args.min_lr <= args.lr", ("min_lr", "lr")),
        ('raise ValueError(f"no', ("scale", "optimizer", "load", "use_it")),
        ('assert args.name(), "never"', ("other", "use_it")),
        ('raise ValueError("neither")', ("other", "use_it")),
        ('raise ValueError("too large")', ("tensor_size", "world_size", "limit")),
        ('raise ValueError("both")', ("layers", "rope")),
        ("raise RuntimeError(self.reason)", ("reason",)),
        ("> args.limit", ("tensor_size", "world_size", "limit")),
        ("class Config", ()),
    ],
)
def test_names_nearest_first(text: str, names: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "source.py"
    file.write_text(SOURCE)
    [line] = [number for number, row in enumerate(SOURCE.splitlines(), 1) if text in row]
    assert names_at(str(file), line) == names


def test_no_source_no_names(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert names_at(str(tmp_path / "broken.py"), 1) == ()
    assert names_at(str(tmp_path / "absent.py"), 1) == ()
    assert names_at("<string>", 1) == ()

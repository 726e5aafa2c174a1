"""Files that a command writes for its user: whole or not at all, and a message where that cannot be."""

from __future__ import annotations

import contextlib
from pathlib import Path

from moekit.problems import MoekitError, error


def write_whole(path: Path, text: str) -> None:
    """Write a file, in place of one that is there.

    Raises:
        MoekitError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as reason:
        raise _refused(path, reason, "give another path") from None


def write_new(path: Path, text: str, hint: str) -> None:
    """Write a file that is not there yet; `hint` is for where it is.

    Raises:
        MoekitError: it is there, or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise error(f"`{path}` exists", hint) from None
    except OSError as reason:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # a full disk takes the name and not the text
        raise _refused(path, reason) from None


def _refused(path: Path, reason: OSError, hint: str = "") -> MoekitError:
    return error(f"cannot write `{path}`: {(reason.strerror or str(reason)).lower()}", hint)

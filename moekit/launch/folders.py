"""Folders and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from moekit.problems import MoekitError, error

LEFT_AFTER_S = 3600.0
"""A folder that was being filled so long ago is filled by nobody any more."""


def claim(path: Path, remedy: str = "give the run another name with `--name`") -> None:
    """Make the folder of a run, which is there only once.

    Raises:
        MoekitError: it is taken, and `remedy` says what to do; or it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except FileExistsError:
        raise error(f"`{path}` already exists", remedy) from None
    except OSError as reason:
        raise _unwritten(path, reason) from None


def place(path: Path, files: Mapping[str, str], remedy: str = "give the run another name with `--name`") -> None:
    """Make the folder of a run with all its files, at once: it is whole where it is there, and there only once.

    Raises:
        MoekitError: the name is taken, and `remedy` says what to do; or it cannot be written.
    """
    whole = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # as no other moekit calls it, on any machine
    try:
        write(whole, files)
        whole.rename(path)  # refused by every file system where something is in the other folder
    except OSError as reason:
        if reason.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise error(f"`{path}` already exists", remedy) from None
        raise _unwritten(path, reason) from None
    finally:
        shutil.rmtree(whole, ignore_errors=True)
        _clear_leavings(path)


def _clear_leavings(path: Path) -> None:
    """Remove what killed moekits left beside a folder that they were filling."""
    for left in path.parent.glob(f".{path.name}.*"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - LEFT_AFTER_S:
                shutil.rmtree(left)


def write(path: Path, files: Mapping[str, str]) -> None:
    """Write files below `path`, all or none: a failure leaves what was there before, and no folder that is empty.

    Raises:
        MoekitError: the disk is full, or does not take them for another reason.
    """
    folders = sorted({(path / name).parent for name in files} | {path})
    temporaries = {path / name: (path / name).with_name(f".{Path(name).name}.{os.getpid()}") for name in files}
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for text, temporary in zip(files.values(), temporaries.values(), strict=True):
            temporary.write_text(text, encoding="utf-8")
        for target, temporary in temporaries.items():
            temporary.replace(target)
    except BaseException as reason:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):
                temporary.unlink()
        for folder in reversed(folders):
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(reason, OSError):
            raise _unwritten(path, reason) from None
        raise


def _unwritten(path: Path, reason: OSError) -> MoekitError:
    return error(f"`{path}` cannot be written: {(reason.strerror or str(reason)).lower()}")

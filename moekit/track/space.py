"""A copy of followed runs in a Space of the Hugging Face hub, made again every ten minutes by a process of its own.

    python -m moekit.track.space --project P --space OWNER/NAME --folder DIR RUN_DIR...

It feeds the runs into a Trackio directory of its own, and has `trackio.sync` carry that to the Space: so the Space has
the runs that one `moekit track` follows and no others, whatever file system the metrics lie on. A new Space is private.
The token is HF_TOKEN of the environment; it is neither passed on a command line nor printed. The hub may hang: this
process is killed then, and what follows the runs does not wait for it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from moekit.lifeline import die_with_parent
from moekit.problems import error

EVERY_S = 600.0
LIMIT_S = 900.0
"""A Space that is new takes minutes to be built, and `trackio.sync` waits for it."""


def need_token(space: str, environ: Mapping[str, str]) -> None:
    """Refuse a name that is no Space's, and a copy without a token to write it with.

    Raises:
        MoekitError: either.
    """
    owner, _, name = space.partition("/")
    if not owner or not name or "/" in name:
        raise error(f"`{space}` names no Space", "give `--space OWNER/NAME`, as the hub shows it")
    if not environ.get("HF_TOKEN"):
        hint = "set it to a token that may write there; it is read from the environment only"
        raise error("`--space` needs HF_TOKEN, which is not set", hint)


class SpaceCopy:
    """The copies of some runs in a Space, one after another, beside whatever the caller does."""

    def __init__(self, space: str, project: str, every_s: float = EVERY_S, limit_s: float = LIMIT_S) -> None:
        self._space, self._project = space, project
        self._every_s, self._limit_s = every_s, limit_s
        self._process: subprocess.Popen[str] | None = None
        self._begun = float("-inf")
        self._folder = ""

    def poll(self, run_dirs: Sequence[Path]) -> str:
        """Begin a copy if it is time; what became of the one before, once it has ended, else empty."""
        said = self._look(killing=time.monotonic() > self._begun + self._limit_s)
        if self._process is None and run_dirs and time.monotonic() > self._begun + self._every_s:
            self._start(run_dirs)
        return said

    def last(self, run_dirs: Sequence[Path]) -> str:
        """Make a last copy, and wait for it as long as a copy may take; what became of it."""
        self.close()
        self._start(run_dirs)
        while not (said := self._look(killing=time.monotonic() > self._begun + self._limit_s)):
            time.sleep(0.2)
        return said

    def close(self) -> None:
        """End a copy that is being made."""
        self._look(killing=True)

    def _start(self, run_dirs: Sequence[Path]) -> None:
        command = [sys.executable, "-m", "moekit.track.space", "--project", self._project, "--space", self._space]
        self._begun = time.monotonic()
        self._folder = tempfile.mkdtemp(prefix="moekit-space-")
        self._process = subprocess.Popen(
            [*command, "--folder", self._folder, *map(str, run_dirs)],
            env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # no terminal, at which the hub's client would ask for a login
            preexec_fn=die_with_parent,
        )

    def _look(self, killing: bool) -> str:
        process = self._process
        if process is None or (process.poll() is None and not killing):
            return ""
        self._process = None
        if late := process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stderr is not None
        words = process.stderr.read().splitlines()
        process.stderr.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        if late or process.wait():
            process.wait()
            why = f"the hub took longer than {self._limit_s:g} s" if late else (words or ["it says nothing"])[-1]
            return f"`{self._space}` was not brought up to date: {why}"
        return f"`{self._space}` is up to date"


def main() -> int:
    """Copy runs to a Space; the exit code, with the reason as the last line of standard error."""
    parser = argparse.ArgumentParser(prog="python -m moekit.track.space")
    parser.add_argument("--project", required=True)
    parser.add_argument("--space", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="an empty one, for Trackio's data")
    parser.add_argument("run_dirs", type=Path, nargs="+")
    options = parser.parse_args()
    os.environ["TRACKIO_STORAGE_MODE"] = "sqlite"
    from moekit.track.feed import Feed
    from moekit.track.storage import Storage

    storage = Storage(options.folder.resolve(), options.project, online=True)
    for run_dir in options.run_dirs:
        Feed(run_dir, storage, remembers=False).send_all()
    try:
        import trackio

        trackio.sync(options.project, options.space, private=True, force=True)
    except Exception as failure:  # whatever the hub's client makes of an answer
        words = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
        print(words.replace(os.environ["HF_TOKEN"], "HF_TOKEN"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

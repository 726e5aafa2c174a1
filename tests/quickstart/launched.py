"""A launch of the real command, with all the processes that belong to it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moekit.launch.rundir import RunDir
from moekit.watch.metrics import MetricsReader

PATIENCE_S = 1800.0
"""A shared machine may take ten times as long as an idle one."""
STEPS, SAVE_INTERVAL = 160, 40
SHORT = f"""
base: quickstart
train: {{iters: {STEPS}}}
schedule: {{decay_iters: {STEPS}}}
checkpoint: {{save_interval: {SAVE_INTERVAL}}}
monitor: {{tokens_per_expert_interval: 4}}
"""


@dataclass
class Launched:
    """A `moekit launch` that may be running; all its processes carry `mark` in their environment."""

    process: subprocess.Popen[bytes]
    run: RunDir
    output: Path
    mark: str

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def wait_for_step(self, step: int) -> None:
        """Until the newest attempt has logged `step`."""
        reader = MetricsReader(self.run.path)
        seen = 0
        deadline = time.monotonic() + PATIENCE_S
        while seen < step:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            attempt = max(self.run.numbers(), default=0)
            seen = max([seen, *(s.step for s in reader.poll() if s.attempt == attempt)])
            time.sleep(0.1)

    def signal(self, number: signal.Signals) -> int:
        """Send `number` to the command alone, as a terminal's Ctrl-C reaches its foreground; the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def processes(self) -> list[int]:
        """Every living process of this launch, by the mark that they inherit."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if f"\0MARK={self.mark}\0".encode() in b"\0" + (entry / "environ").read_bytes() + b"\0":
                        found.append(int(entry.name))
        return found

    def workers(self) -> list[int]:
        """The training processes, by rank."""
        ranked = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
                variables = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
                ranks = [v.removeprefix(b"RANK=") for v in variables if v.startswith(b"RANK=")]
                if ranks and b"job/entry.py" in words:
                    ranked[int(ranks[0])] = pid
        return [ranked[rank] for rank in sorted(ranked)]

    def listeners(self) -> set[str]:
        """The sockets on which its processes listen, by inode: another program may take a port that was given back."""
        found = set()
        for pid in self.processes():
            for fd in Path("/proc", str(pid), "fd").glob("*"):
                with contextlib.suppress(OSError):
                    found.add(str(fd.readlink()))
        return found & listening()

    def assert_nothing_is_left(self, listeners: set[str] | None = None, within_s: float = 60.0) -> None:
        """No process, no lock, and no socket that it listened on."""
        deadline = time.monotonic() + within_s
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert self.processes() == []
        assert not is_locked(self.run)
        assert not (listeners or set()) & listening()


def listening() -> set[str]:
    """All TCP sockets of this machine that somebody listens on, as /proc/PID/fd names them."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}


def is_locked(run: RunDir) -> bool:
    import fcntl

    with (run.path / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


Launch = Callable[..., Launched]

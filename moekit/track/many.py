"""`moekit track`: runs followed from a login node until they have ended, by one process for all of them.

It is started by hand, and `moekit launch` names the line. A launch starts none by itself: many sites kill what stays
behind on a login node, and nobody would be told. Nor does the job: its container has neither moekit nor Trackio, and a
node outside it need not have Python. Nothing is lost meanwhile: a run's metrics are in its files, and whoever follows
it later brings all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moekit.launch.rundir import RunDir
from moekit.problems import MoekitError, error
from moekit.runs.look import Seen, look
from moekit.track.feed import Feed
from moekit.track.lock import RunLock
from moekit.track.space import SpaceCopy
from moekit.track.storage import Storage

ASKED_EVERY_S = 60.0
"""Slurm is asked no more often than that, in one call for all runs; of runs of this machine, files say all."""


@dataclass
class _Followed:
    """One run while it is followed."""

    run: RunDir
    lock: RunLock
    feed: Feed | None
    ended: bool = False
    """Whether no job of it waits or runs."""
    failure: str = ""
    """Why the last pass did not send all there is."""


@dataclass
class Tracker:
    """Follows runs. Two may do so at once: the second says which runs the first has, and follows the others."""

    runs: Callable[[], Sequence[RunDir]]
    """The runs meant; asked again and again, as there may be new ones."""
    storage: Storage
    say: Callable[[str], None]
    """Takes a line."""
    interval_s: float = 30.0
    space: SpaceCopy | None = None
    _followed: dict[Path, _Followed] = field(default_factory=dict)
    _done: set[Path] = field(default_factory=set)
    _held: set[Path] = field(default_factory=set)
    _said: set[str] = field(default_factory=set)
    _slurm: bool = True

    def follow(self, once: bool = False) -> bool:
        """Follow until no run waits or runs, and all of their metrics are sent.

        With `once`, what is there now is sent, and that is all. False where that failed, or others follow all of them.

        Raises:
            MoekitError: a run's directory cannot be written.
        """
        asked = float("-inf")
        while True:
            if not self._slurm or time.monotonic() > asked + ASKED_EVERY_S:
                self._look()
                asked = time.monotonic()
            self._send()
            if once or not self._followed:
                return self._end()
            if self.space is not None and (said := self.space.poll(self._paths())):
                self.say(said)
            time.sleep(self.interval_s)

    def close(self) -> None:
        """Let go of everything, wherever it is."""
        for one in self._followed.values():
            one.lock.release()
        if self.space is not None:
            self.space.close()

    def _look(self) -> None:
        """Ask what the runs are, and take up those that go on, or were never followed to their end."""
        seen, problems = look([run for run in self.runs() if run.path not in self._done])
        for problem in problems:
            self._say_once(f"{problem.what}; runs are followed all the same")
        self._slurm = any(not one.files.local for one in seen)
        for one in seen:
            followed = self._followed.get(one.files.run.path) or self._take_up(one)
            if followed is not None:
                followed.ended = not one.state.active and not problems

    def _take_up(self, seen: Seen) -> _Followed | None:
        run = seen.files.run
        lock = RunLock(run.path)
        try:
            holder = lock.take()
        except OSError as reason:
            why = (reason.strerror or str(reason)).lower()
            raise error(f"`{run.path}` cannot be written: {why}", "who launched a run tracks it") from None
        if holder:
            self._say_once(f"{run.path.name}: followed already, by {holder}")
            self._held.add(run.path)
            return None
        feed = Feed(run.path, self.storage)
        if feed.is_complete and not seen.state.active:
            lock.release()
            self._done.add(run.path)
            return None
        self.say(f"{run.path.name}: {seen.state.word}")
        self._followed[run.path] = _Followed(run, lock, feed)
        return self._followed[run.path]

    def _send(self) -> None:
        """Send what is new, some of each run in turn, so that none waits for a long one."""
        turn = list(self._followed.values())
        while turn:
            turn = [one for one in turn if self._send_some(one)]
        for one in list(self._followed.values()):
            if one.ended and one.feed and not one.failure:
                self._finish(one, one.feed)

    def _send_some(self, one: _Followed) -> bool:
        try:
            one.feed = one.feed or Feed(one.run.path, self.storage)
            more = one.feed.send_some()
        except MoekitError:
            raise
        except Exception as failure:  # a full disk, a locked database: from the last slice that was sent
            words = f"{type(failure).__name__}: {failure}"
            if words != one.failure:
                self.say(f"{one.run.path.name}: {words}; trying again")
            one.feed, one.failure = None, words
            return False
        one.failure = ""
        return more

    def _finish(self, one: _Followed, feed: Feed) -> None:
        feed.complete()
        one.lock.release()
        del self._followed[one.run.path]
        self._done.add(one.run.path)
        said = "it has no metrics" if feed.is_empty else "ended, all of it is in Trackio"
        self.say(f"{one.run.path.name}: {said}")

    def _end(self) -> bool:
        whole = not any(one.failure for one in self._followed.values())
        whole = whole and not (self._held and not self._paths())
        if self.space is not None:
            self.say(self.space.last(self._paths()))
        self.close()
        return whole

    def _paths(self) -> list[Path]:
        return sorted([*self._followed, *self._done])

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

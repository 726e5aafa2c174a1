"""What a run is: from its files, and from what Slurm says of its jobs. Nothing here asks Slurm or writes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moekit.job.attempts import Facts
from moekit.job.endings import STOPPED, exit_records, last_step
from moekit.launch.processes import LOCK
from moekit.launch.rundir import RunDir, checkpointed_step
from moekit.launch.slurm_text import Job, number
from moekit.problems import Problem
from moekit.runs import submissions
from moekit.runs.submissions import Submission

if TYPE_CHECKING:
    from moekit.job.retry import Decision

HF_JOB = "hf_job.json"
"""In the directory of a run that was submitted as a Hugging Face Job: what was submitted."""
RETURNS_S = 600.0
"""A job that has ended can be put back into the queue until Slurm forgets it (slurm.conf: MinJobAge, 300 s unsaid)."""
_CLOCKS_S = 5.0
"""Nodes, file system and controller may differ by so much."""


@dataclass(frozen=True)
class Files:
    """What a run's files say."""

    run: RunDir
    local: bool = False
    """Whether it is trained on this machine and not by Slurm."""
    elsewhere: bool = False
    """Whether it is a Hugging Face Job: its state is the Hub's to tell (`launch/hf_jobs_run.py`)."""
    locked: bool = False
    """Whether a launch on this machine is training it now."""
    submissions: list[Submission] = field(default_factory=list)
    """The newest first, down to the first that has ended."""
    started: list[str] = field(default_factory=list)
    """The numbers of all its jobs that ever started."""
    attempt: int = 0
    """The newest start; 0 before the first."""
    step: int = 0
    """The last step that the newest attempt logged."""
    checkpoint: int = 0
    """The step of the last complete checkpoint."""
    total: int | None = None
    """The last step of the whole training; None where no file says it."""
    exit_interval: int = 0
    """Training ends at a multiple of it; 0 for none."""
    time: float = 0.0
    """When it was last submitted or begun, in seconds since 1970."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run.path.name

    @property
    def exits(self) -> list[int]:
        """The exit codes of the newest attempt's ranks that could still say one; a file each is read."""
        records = exit_records(self.run.attempt(self.attempt).path) if self.attempt else {}
        return [record["code"] for record in records.values()]

    @property
    def newest(self) -> int:
        """The number of the newest submission, 0 where there is none."""
        return self.submissions[0].number if self.submissions else 0

    @property
    def newest_job(self) -> str | None:
        """The newest submission's job."""
        return self.submissions[0].job if self.submissions else None

    @property
    def open_jobs(self) -> list[str]:
        """The jobs whose end nobody has put down yet, the oldest first."""
        return [one.job for one in reversed(self.submissions) if one.job and not one.ended]

    @property
    def job_that_may_be_back(self) -> str | None:
        """The newest job, where its end was put down and Slurm may have put it back into its queue since then."""
        newest = self.submissions[0] if self.submissions else None
        if newest is None or newest.ended is None:
            return None
        ended = newest.ended.end or 0.0
        again = _modified(f"{self.run.jobs}/{number(newest.job or '')}") > (ended or newest.time) + _CLOCKS_S
        return newest.job if again or abs(time.time() - ended) < RETURNS_S else None

    @property
    def unsubmitted_jobs(self) -> list[str]:
        """Jobs that started and are in no submission: lost, or submitted by hand. Slurm's numbers only grow."""
        return [job for job in self.started if int(job) > self.last_number]

    @property
    def last_number(self) -> int:
        """The highest number of a job that a submission names."""
        return max((int(number(one.job)) for one in self.submissions if one.job), default=0)

    @property
    def searched_for(self) -> bool:
        """Whether Slurm may have a job of it that no file names."""
        never = not self.submissions and not self.started
        return not self.local and (never or any(one.lost for one in self.submissions))

    @property
    def done(self) -> bool:
        """Whether the last complete checkpoint is the end of training."""
        return self._at_end(self.checkpoint)

    def _at_end(self, step: int) -> bool:
        return bool(step) and Facts(total=self.total or 0, exit_interval=self.exit_interval).is_end(step)


@dataclass(frozen=True)
class State:
    """A run in a word, and what that rests on."""

    word: str
    """written, submitting, refused, lost, unknown, finished, forgotten, or Slurm's word for its job in small letters;
    of a run whose job Slurm has forgotten, or of one on this machine, completed, failed, stopped or killed."""
    detail: str = ""
    """Why it waits, failed or was refused; empty where there is nothing to say."""
    job: Job | None = None
    """The job that the word is about."""
    live: tuple[Job, ...] = ()
    """All its jobs that wait or run."""

    @property
    def active(self) -> bool:
        """Whether it waits, runs, is being submitted, or nobody knows."""
        return bool(self.live) or self.word in ("submitting", "unknown", "running")


def read_files(run: RunDir) -> Files:
    """What a run's files say; what cannot be read is left at its default."""
    folder = str(run.path)
    local = not os.path.exists(f"{folder}/job.sbatch")  # noqa: PTH110  # a thousand runs are read in one go
    attempt = max(run.numbers(), default=0)
    known = [] if local else submissions.read(run)
    total, exit_interval = _end(f"{folder}/end")
    return Files(
        run=run,
        local=local,
        elsewhere=local and os.path.exists(f"{folder}/{HF_JOB}"),  # noqa: PTH110
        locked=local and _locked(f"{folder}/{LOCK}"),
        submissions=known,
        started=[] if local else submissions.started_jobs(run),
        attempt=attempt,
        step=last_step(f"{folder}/attempts/{attempt}/metrics.jsonl") if attempt else 0,
        checkpoint=checkpointed_step(run),
        total=total,
        exit_interval=exit_interval,
        time=known[0].time if known else _modified(f"{folder}/attempts/{attempt}" if attempt else folder),
    )


def judge(files: Files, jobs: Mapping[str, Job], answered: bool = True) -> State:
    """What a run is.

    `jobs` are its jobs as Slurm tells them, by id; one that is missing Slurm has forgotten, unless not `answered`.
    """
    if files.local:
        return _finished(files, _local(files))
    told = [jobs[job] for job in files.open_jobs if job in jobs]
    live = tuple(job for job in told if not job.ended)
    if live:
        job = next((job for job in live if not job.waiting), live[0])
        return State(job.state.lower(), job.reason, job, live)
    if any(one.in_hand for one in files.submissions):
        return State("submitting")
    if not answered and (files.open_jobs or files.searched_for):
        return State("unknown", f"job {', '.join(files.open_jobs)}" if files.open_jobs else "")
    return _finished(files, _ended(files, jobs))


def _ended(files: Files, jobs: Mapping[str, Job]) -> State:
    """What a run is that has no job now."""
    newest = files.submissions[0] if files.submissions else None
    last = next((one for one in files.submissions if one.job), None)
    refused = newest.said if newest and newest.phase == "refused" else ""
    if last and (job := last.ended or jobs.get(last.job or "")):
        return State(job.state.lower(), refused or job.reason, job)
    if last:  # Slurm has forgotten it
        return State(_by_exits(files), refused, Job(last.job or "", "UNKNOWN"))
    if newest is None:
        return State("written")
    if newest.phase == "refused":
        return State("refused", refused)
    return State("lost", newest.said or "moekit ended before Slurm answered, and no job of it can be found")


def _local(files: Files) -> State:
    if files.locked:
        return State("running")
    if files.elsewhere:
        return State("submitted", f"`moekit status {files.name}` asks the Hub")
    return State(_by_exits(files) if files.attempt else "written")


def _by_exits(files: Files) -> str:
    """How an attempt ended whose job nobody knows any more, by what its ranks wrote."""
    codes = files.exits
    if not codes:
        return "forgotten" if not files.attempt else "killed"
    if all(code == 0 for code in codes):
        return "completed"
    return "stopped" if all(code in (0, *STOPPED) for code in codes) else "failed"


def _finished(files: Files, state: State) -> State:
    """`finished` where the end of training was reached: by a checkpoint, or else by a job that ended well."""
    if state.active or not files.attempt:
        return state
    ended_well = state.word == "completed" and files._at_end(files.step)
    return State("finished", "", state.job) if files.done or ended_well else state


def cannot_resume(
    files: Files, state: State, decision: Decision | None, anew: bool = False, anyway: bool = False
) -> Problem | None:
    """Why no further job of a run can be submitted; None where it can.

    `decision` is what that job would decide itself. `anew` says that it may begin anew, `anyway` that it may go on in
    spite of a decision to stop.
    """
    name, place = files.name, str(files.run.path)
    if files.elsewhere:
        what = f"run `{name}` is a Job of the Hub"
        return Problem(place, what, "the `moekit launch` that began it goes on from the last checkpoint in the bucket")
    if files.local:
        what = f"run `{name}` is trained on this machine"
        return Problem(place, what, "the `moekit launch` that began it goes on from its last checkpoint")
    if state.live:
        jobs = ", ".join(f"{job.id} is {job.state.lower()}" for job in state.live)
        what = f"run `{name}` has a job already: {jobs}"
        return Problem(place, what, f"`moekit logs -f {name}` follows it, `moekit cancel {name}` ends it")
    if state.word == "submitting":
        return Problem(place, f"run `{name}` is being submitted just now", f"`moekit status {name}` says its job")
    if state.word == "unknown":
        what = f"Slurm does not answer, so whether run `{name}` has a job is not known"
        return Problem(place, what, "two jobs would write over each other's checkpoints: try again when Slurm answers")
    if state.word == "finished" or (decision and decision.action == "finished"):
        what = f"run `{name}` is finished, at step {max(files.checkpoint, files.step):,}"
        return Problem(place, what, "`moekit launch` with `--name` trains another")
    if decision is None or not files.attempt:
        return None
    stop = f"run `{name}` does not go on: {decision.sentence}" if decision.action == "stop" else ""
    if not decision.step and not anew:
        what = stop or f"run `{name}` has no complete checkpoint, so a further job would begin anew"
        return Problem(
            place, what, f"`moekit resume {name} --anew` {'begins anew all the same' if stop else 'does that'}"
        )
    if stop and decision.step and not anyway:
        hint = f"`moekit resume {name} --anyway` goes on from step {decision.step:,} all the same"
        return Problem(place, stop, hint)
    return None


def _end(path: str) -> tuple[int | None, int]:
    """The file `end`: the last step of the training, and its `train.exit_interval` or 0."""
    try:
        lines = _text(path).split()
        return int(lines[0]), int(lines[1])
    except (OSError, ValueError, IndexError):
        return None, 0


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        return file.read()


def _locked(path: str) -> bool:
    """Whether a launch on this machine holds the run (`processes.only_launch`)."""
    try:
        with open(path) as file:  # noqa: PTH123
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _modified(path: str) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116
    except OSError:
        return 0.0

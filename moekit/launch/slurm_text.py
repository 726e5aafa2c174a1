"""What Slurm's commands print, read into values. Pure text: nothing here asks anybody.

Read from a real Slurm 22.05 and 24.11; of sacct in 24.11 the manual alone was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"),
    )
)
"""The states after which a job does nothing any more."""

WAITING = frozenset(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"))
"""The states of a job that holds no nodes yet."""

SQUEUE_FIELDS = (
    "JobID",
    "State",
    "Reason",
    "exit_code",
    "StartTime",
    "EndTime",
    "NumNodes",
    "NodeList",
    "Cluster",
    "Name",
    "WorkDir",  # last: the one that may hold anything
)
SACCT_FIELDS = (
    "JobID",
    "State",
    "Reason",
    "ExitCode",
    "Start",
    "End",
    "NNodes",
    "NodeList",
    "Cluster",
    "JobName",
    "WorkDir",
)

_NO_VALUE = ("", "(null)", "None", "N/A", "NONE", "Unknown", "None assigned")


@dataclass(frozen=True, slots=True)
class Job:
    """A job as Slurm tells it."""

    id: str
    """Its number; in front of `;cluster` where it was submitted to another cluster than the default one."""
    state: str
    """Slurm's word: PENDING, RUNNING, COMPLETED, FAILED, ..."""
    reason: str = ""
    """Why it waits, or ended so; empty where Slurm says none."""
    exit_code: str = ""
    """`code:signal` of an ended job; empty before."""
    start: float | None = None
    """When it started, of a waiting job when Slurm expects to start it; seconds since 1970, None where nobody knows."""
    end: float | None = None
    """When it ended; None before that."""
    node_count: int = 0
    nodes: str = ""
    """Slurm's short form, `n[1-2]`; empty while it waits."""
    name: str = ""
    folder: str = ""
    """Its working directory."""
    cluster: str = ""
    """The cluster it is on, where Slurm says."""

    @property
    def ended(self) -> bool:
        """Whether it does nothing any more."""
        return self.state in ENDED

    @property
    def waiting(self) -> bool:
        """Whether it holds no nodes yet."""
        return self.state in WAITING


def submitted_id(stdout: str) -> str | None:
    """The job that `sbatch --parsable` names, `123` or `123;cluster`, among whatever else a site prints there."""
    found = re.findall(r"^(\d+(?:;[\w.-]+)?)\s*$", stdout, re.MULTILINE)
    # a wrapper that takes `--parsable` away leaves the sentence
    found = found or re.findall(r"^Submitted batch job (\d+)\b", stdout, re.MULTILINE)
    return str(found[-1]) if found else None


def number(job: str) -> str:
    """The job's number, without its cluster."""
    return job.partition(";")[0]


def cluster(job: str) -> str:
    """The cluster behind a job's number; empty for the default one."""
    return job.partition(";")[2]


def refusal(stderr: str) -> tuple[str, str]:
    """Why sbatch refused, in Slurm's words, and what else it or the site's own plugin said."""
    said = [re.sub(r"^(sbatch|srun|salloc): ((error|fatal): )?", "", line).strip() for line in stderr.splitlines()]
    said = [line for line in said if line]
    failed = [line for line in said if line.startswith("Batch job submission failed: ")]
    if not failed:
        return (said[-1] if said else "it said nothing"), "; ".join(said[:-1])
    others = [line for line in said if line not in failed]
    return failed[-1].removeprefix("Batch job submission failed: "), "; ".join(others)


def no_answer(stderr: str) -> bool:
    """Whether a client says that it did not hear from the controller: what it asked for may have been done."""
    told = r"timed out|Unable to contact|Zero Bytes|[Cc]onnect(ion)? (failure|refused|reset)|Communication|not respond"
    return re.search(told, stderr) is not None


def no_accounting(stderr: str) -> bool:
    """Whether there is nothing that sacct could ask."""
    return "accounting storage is disabled" in stderr


def unknown_job(stderr: str) -> bool:
    """Whether a client does not know the one job it was asked for."""
    return "Invalid job id" in stderr


def squeue_jobs(stdout: str) -> list[Job]:
    """The jobs that `squeue -O` lists, its fields `SQUEUE_FIELDS`, each with a `|` behind; times as `%s`."""
    return [_job(fields) for fields in _rows(stdout, SQUEUE_FIELDS)]


def sacct_jobs(stdout: str) -> list[Job]:
    """The jobs that `sacct --parsable2 --allocations` lists, its fields `SACCT_FIELDS`; times as `%s`."""
    return [_job(fields) for fields in _rows(stdout, SACCT_FIELDS)]


def scontrol_jobs(stdout: str) -> list[Job]:
    """The jobs that `scontrol --oneliner show job` lists; times as `%s`, or as it prints them, in local time."""
    found = []
    for line in stdout.splitlines():
        if not line.startswith("JobId="):
            continue
        pairs: list[tuple[str, str]] = re.findall(r"(\S+?)=(.*?)(?=\s+[\w/:&-]+=|\s*$)", line)
        said = dict(reversed(pairs))  # what a command line further on contains is none of the job's fields
        names = ("JobId", "JobState", "Reason", "ExitCode", "StartTime", "EndTime", "NumNodes", "NodeList")
        values = [said.get(name, "") for name in names]
        found.append(_job([*values, "", said.get("JobName", ""), said.get("WorkDir", "")]))
    return found


def _rows(stdout: str, names: Sequence[str]) -> Iterator[list[str]]:
    """The fields of each line that is a job's; a site's notices and the headings of clusters are none."""
    for line in stdout.splitlines():
        fields = line.removesuffix("|").split("|", len(names) - 1)
        if len(fields) == len(names) and re.match(r"\d", fields[0].strip()):
            yield [value.strip() for value in fields]


def _job(fields: Sequence[str]) -> Job:
    job, state, reason, exit_code, start, end, node_count, nodes, where, name, folder = fields
    state = re.match(r"\w*", state)[0].upper()  # type: ignore[index]  # `CANCELLED by 1000`
    ended = state in ENDED
    return Job(
        id=job,
        state=state,
        reason=_said(reason),
        exit_code=_exit_code(exit_code) if ended else "",
        start=_time(start),
        end=_time(end) if ended else None,
        node_count=_count(node_count),
        nodes=_said(nodes),
        name=name,
        folder=folder,
        cluster=_said(where),
    )


def _said(value: str) -> str:
    return "" if value in _NO_VALUE else value


def _exit_code(value: str) -> str:
    """`3:0`; squeue of 22.05 prints what wait(2) gave, 768."""
    if value.isdecimal():
        return f"{int(value) >> 8 & 0xFF}:{int(value) & 0x7F}"
    return _said(value)


def _count(value: str) -> int:
    """A number of nodes; of a waiting job it may be a range, `2-4`, and of many `1K`."""
    found = re.match(r"(\d+)(K?)", value)
    return int(found[1]) * (1024 if found[2] else 1) if found else 0


def _time(value: str) -> float | None:
    if value in _NO_VALUE:
        return None
    if value.isdecimal():
        return float(value) or None
    try:
        return datetime.fromisoformat(value).timestamp()
    except ValueError:
        return None

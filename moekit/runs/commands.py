"""`moekit status | why | list | logs | cancel | resume | bundle`: runs, once they are launched."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moekit.options import JsonOption
from moekit.problems import error

if TYPE_CHECKING:
    from moekit.launch.rundir import RunDir
    from moekit.runs.look import Seen

app = typer.Typer()

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or the path of its directory.")]

ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", envvar="MOEKIT_PROFILE", help="Profile of the cluster whose runs are meant."),
]

RECENT_S = 24 * 3600.0
"""`status` shows what ended since then."""


@app.command("status")
def status(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run's name, or its directory's path.")] = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a run is: its job, its step, its last checkpoint, why it waits or failed, and what to do next.

    Without RUN: a line for each run that waits, runs, or ended in the last 24 hours.

    A run is `written` (never submitted), `submitting`, `refused` (by Slurm, whose words follow), `lost` (moekit ended
    before Slurm answered, and it has no job), `unknown` (Slurm does not answer), `finished`; else in Slurm's word for
    its job: `pending`, `running`, `completed` (before the end of training), `failed`, `timeout`, `cancelled` ...
    """
    if run is None:
        _say_all(profile, as_json, recent=True)
        return
    from moekit.launch.hf_jobs_run import record_of, say_status
    from moekit.runs import report
    from moekit.runs.history import read_history
    from moekit.runs.look import look_at

    found = _find(run, profile)
    if job := record_of(found):
        say_status(found, job, as_json)
        return
    seen, problems = look_at(found)
    if as_json:
        print(json.dumps(report.as_json(seen), indent=1))
    else:
        print("\n".join(report.full(seen, read_history(seen), profile)))
    report.say_problems(problems)


@app.command("why")
def why(run: RunArgument, profile: ProfileOption = None, as_json: JsonOption = False) -> None:
    """Say what became of each attempt of a run, why it ended and what that led to; and what its next job would do.

    That is decided by the files that the attempts left, the same way as the job itself decides when it starts.
    """
    from moekit.runs import report
    from moekit.runs import why as reasons
    from moekit.runs.history import read_history
    from moekit.runs.look import look_at

    seen, problems = look_at(_find(run, profile))
    history = read_history(seen)
    if as_json:
        print(json.dumps(reasons.as_json(seen, history, profile), indent=1))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(reasons.lines(seen, history, profile, width)))
    report.say_problems(problems)


@app.command("list")
def list_runs(profile: ProfileOption = None, as_json: JsonOption = False) -> None:
    """List all runs, the newest first: the profile's, and this machine's in `moekit-local/`.

    Slurm is asked once for all of them. `moekit status --help` explains the states.
    """
    _say_all(profile, as_json, recent=False)


@app.command("logs")
def logs(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until no job of the run is left, over all attempts.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="So many last lines first.")] = 40,
    profile: ProfileOption = None,
) -> None:
    """Print the end of a run's log: what torchrun and Megatron print in its newest attempt.

    With -f, Ctrl-C ends the following and not the run.
    """
    from moekit.launch.hf_jobs_run import record_of, say_logs
    from moekit.runs import logs as reading
    from moekit.runs import report
    from moekit.runs.look import look_at

    found = _find(run, profile)
    job = record_of(found)
    if follow or job:
        try:
            if job:
                say_logs(job, follow, lines)
                return
            seen = reading.follow(found, lines, report.headline)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        print(report.headline(seen), file=sys.stderr)
        return
    log = reading.newest_log(found, None)
    if log is None:
        seen, problems = look_at(found)
        log = reading.newest_log(found, seen.state.job.id if seen.state.job else None)
        report.say_problems(problems)
    if log is None:
        raise error(f"run `{found.path.name}` has no log yet: it is {seen.state.word}", f"`moekit logs -f {run}` waits")
    print(f"==> {log} <==", file=sys.stderr, flush=True)
    sys.stdout.buffer.write(reading.last_lines(log, lines)[0])


@app.command("cancel")
def cancel(
    run: RunArgument,
    save: Annotated[
        bool,
        typer.Option("--save", help="Have training save and end by itself (`resilience.exit_signal_handler`)."),
    ] = False,
    profile: ProfileOption = None,
) -> None:
    """End a run: all its jobs, those that wait too. What it saved stays; `moekit resume` goes on from there."""
    from moekit.launch.hf_jobs_run import cancel as cancel_hf_job
    from moekit.launch.hf_jobs_run import record_of
    from moekit.runs.cancelling import cancel_jobs, cancel_local
    from moekit.runs.look import look_at

    found = _find(run, profile)
    if job := record_of(found):
        print(cancel_hf_job(found, job))
        return
    seen, problems = look_at(found)
    if seen.files.local:
        print(cancel_local(seen))
    else:
        print(cancel_jobs(seen, save, problems))


@app.command("resume")
def resume(
    run: RunArgument,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Go on from the last complete checkpoint though the decision is to stop.")
    ] = False,
    anew: Annotated[
        bool, typer.Option("--anew", help="Begin anew where there is no complete checkpoint, whatever happened.")
    ] = False,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit the next job of a run that has ended, from its last complete checkpoint; or of one never submitted.

    Refused while it has a job, when it is finished, when it would begin anew, and where the job itself would decide to
    stop (`moekit why`). Nodes under suspicion are excluded. The job runs what the directory holds: the recipe it was
    launched with, at the same commit of Megatron.
    """
    from moekit.launch.submit import resume as submit_next
    from moekit.runs.report import say_submitted

    say_submitted(submit_next(_find(run, profile), anew, anyway), profile, as_json)


@app.command("bundle")
def bundle(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The archive; else `moekit-bundle-RUN.tar.gz` in this folder.")
    ] = None,
    max_mib: Annotated[int, typer.Option("--max-mib", min=1, help="At most so much, unpacked.")] = 5,
    show: Annotated[bool, typer.Option("--show", help="Print all that would go in, and write nothing.")] = False,
    profile: ProfileOption = None,
) -> None:
    """Pack what one needs to ask for help with a run, without secrets, host names, user names and the like.

    Recipe, arguments, provenance, job, decisions and exit records whole; of logs and metrics the beginning, the end and
    what is around the first cause; what `moekit why` and `moekit doctor` say. A masked name is one word everywhere.

    Read it (`--show`) before you send it: no pattern knows every secret.
    """
    from moekit.runs import bundle as bundles

    found = _find(run, profile)
    made = bundles.make(found, max_mib, profile)
    if show:
        for text in bundles.shown(made):
            sys.stdout.write(text)
        return
    path = out or Path(f"{made.name}.tar.gz")
    size = bundles.write(made, path)
    print(f"{path}: {len(made.parts) + 1:,} files, {size / 1024:,.0f} KiB")
    for what, rows in (("masked", made.masked), ("left out", made.left_out)):
        for at, row in enumerate(rows[:20] or ["nothing"]):
            print(f"  {'' if at else what:9} {row}")
        if len(rows) > 20:
            print(f"  {'':9} and {len(rows) - 20:,} more: its README.txt")
    print(f"  {'look':9} moekit bundle {run} --show", file=sys.stderr)


def _find(run: str, profile: str | None) -> RunDir:
    from moekit.runs.look import find_run, roots

    return find_run(run, [] if "/" in run else roots(profile))


def _say_all(profile: str | None, as_json: bool, recent: bool) -> None:
    from moekit.runs import report
    from moekit.runs.look import all_runs, look, roots

    shared_roots = roots(profile)
    if not shared_roots:
        raise error("no profile says where runs lie", "give `--profile`, or set MOEKIT_PROFILE for all commands")
    seen, problems = look(all_runs(shared_roots))
    seen.sort(key=_time, reverse=True)
    shown = [one for one in seen if not recent or one.state.active or _time(one) > time.time() - RECENT_S]
    if as_json:
        print(json.dumps([report.as_json(one) for one in shown], indent=1))
    elif shown:
        print("\n".join(report.table(shown)))
    if not as_json and len(shown) < len(seen):
        more = len(seen) - len(shown)
        print(f"{more} run{'s' * (more > 1)} ended more than 24 hours ago: `moekit list`", file=sys.stderr)
    elif not as_json and not seen:
        print(f"no runs in {' and '.join(str(root / 'runs') for root in shared_roots)}", file=sys.stderr)
    report.say_problems(problems)


def _time(seen: Seen) -> float:
    """When something last happened to a run."""
    job = seen.state.job
    return (job.end if job and job.end else None) or seen.files.time

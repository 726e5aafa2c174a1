"""`moekit doctor`: from what a run left, or a log, or a person's words, to the first cause."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moekit.options import JsonOption
from moekit.problems import error, shortened
from moekit.runs.commands import ProfileOption

if TYPE_CHECKING:
    from moekit.doctor.report import Report
    from moekit.doctor.symptoms import Symptom

app = typer.Typer()


@app.command("doctor")
def doctor(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="A run's name, or its directory's path; or a log, `-` for one on standard input."
        ),
    ] = None,
    symptom: Annotated[
        str | None, typer.Option("--symptom", metavar="WORDS", help="What you see; the nearest symptoms are explained.")
    ] = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong with a run, how sure that is, what would tell more, and what to change.

    It reads what the run left: logs, exit records, metrics, counts of tokens by expert, the recipe. Of a log it says
    the first cause and not the last line. It names no cause without evidence; where it finds nothing, it says what it
    looked at. First it says whether the stack itself is proven (`moekit prove`). Exit code 0, whatever it finds.
    """
    from moekit.doctor import report

    if run is None and symptom is None:
        raise error(
            "there is nothing to look at", "name a run, or `-` for a log on standard input, or `--symptom WORDS`"
        )
    asked = _asked(symptom) if symptom is not None else []
    if run is None:
        said = report.Report(f"symptoms nearest to `{shortened(symptom or '')}`", [], [], asked=asked)
    else:
        said = _of_log(run, asked) if run == "-" or Path(run).is_file() else _of_run(run, profile, asked)
    if as_json:
        print(json.dumps(report.as_json(said), indent=1))
        return
    width = shutil.get_terminal_size((100, 24)).columns
    for row in report.lines(said, width):
        print(row)


def _asked(words: str) -> list[Symptom]:
    from moekit.doctor.symptoms import nearest, symptoms

    found = nearest(words)
    if not found:
        labels = dict.fromkeys(label for one in symptoms().values() for label in one.labels)
        raise error(f"no symptom is near `{shortened(words)}`", f"say what moves; runs are {', '.join(labels)}")
    return found


def _of_log(given: str, asked: list[Symptom]) -> Report:
    from moekit.doctor.evidence import Log
    from moekit.doctor.report import Report, of_logs
    from moekit.doctor.triage import read_log

    if given == "-":
        title, path, triage = "a log on standard input", Path(), read_log(sys.stdin.buffer)
    else:
        title, path = f"log `{given}`", Path(given)
        try:
            with path.open("rb") as file:
                triage = read_log(file)
        except OSError as failure:
            raise error(f"cannot read `{given}`: {str(failure.strerror).lower()}") from None
    looked = [f"{triage.lines:,} lines of a log ({triage.bytes:,} bytes), for the messages of known causes"]
    looked.append("A log alone does not say which stack trained it, so its proofs were not looked for.")
    return Report(title, of_logs([Log(0, path, triage)]), looked, asked=asked)


def _of_run(given: str, profile: str | None, asked: list[Symptom]) -> Report:
    from moekit.doctor.evidence import gather
    from moekit.doctor.proofs import proofs
    from moekit.doctor.report import Report, findings, looked_at
    from moekit.runs import report as runs
    from moekit.runs.history import read_history
    from moekit.runs.look import find_run, look_at, roots

    found = find_run(given, [] if "/" in given else roots(profile))
    seen, problems = look_at(found)
    evidence = gather(found, read_history(seen))
    runs.say_problems(problems)
    return Report(runs.headline(seen), findings(evidence), looked_at(evidence), proofs(found), asked)

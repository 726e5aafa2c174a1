"""A run that was submitted as a Hugging Face Job, once it is launched: its record, and what the Hub says of it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from moekit.launch import hf_jobs_hub
from moekit.launch.folders import write
from moekit.launch.hf_jobs import Request
from moekit.launch.rundir import RunDir
from moekit.problems import error
from moekit.runs.state import HF_JOB

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_SETTLES_S = 30.0
"""A log can end a little before the Hub says that its Job has."""


def record(run: RunDir, job: hf_jobs_hub.Seen, namespace: str, bucket: str, request: Request) -> None:
    """Put down what was submitted; no value of a secret is in it."""
    said = {"job": job.id, "namespace": namespace, "url": job.url, "bucket": bucket, "request": request.body()}
    write(run.path, {HF_JOB: json.dumps(said, indent=1) + "\n"})


def record_of(run: RunDir) -> dict[str, Any] | None:
    """What was submitted; None for a run that is no Job."""
    try:
        said = json.loads((run.path / HF_JOB).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and {"job", "namespace", "bucket", "url"} <= set(said) else None


def at_end(api: HfApi, job: str, namespace: str) -> hf_jobs_hub.Seen:
    """A Job whose log has ended, as soon as the Hub says that it has too."""
    deadline = time.monotonic() + _SETTLES_S
    while True:
        seen = hf_jobs_hub.inspect(api, job, namespace)
        if seen.ended or time.monotonic() > deadline:
            return seen
        time.sleep(1.0)


def sentence(seen: hf_jobs_hub.Seen) -> str:
    """What a Job is, in words."""
    return f"job {seen.id} is {seen.stage.lower()}" + (f": {seen.message}" if seen.message else "")


def say_status(run: RunDir, said: dict[str, Any], as_json: bool) -> None:
    """Print what the Hub says of a run's Job, and where its logs and checkpoints are."""
    seen = hf_jobs_hub.inspect(hf_jobs_hub.client(), said["job"], said["namespace"])
    bucket = f"hf://buckets/{said['bucket']}/runs/{run.path.name}"
    if as_json:
        facts = {"run": run.path.name, "on": "hf-jobs", "job": seen.id, "state": seen.stage.lower()}
        print(json.dumps({**facts, "detail": seen.message or None, "url": seen.url, "bucket": bucket}, indent=1))
        return
    print(f"{run.path.name}: {sentence(seen)}")
    print(f"  page        {seen.url}\n  bucket      {bucket}\n  directory   {run.path}")
    print(f"  bring       {pulled(run, said)}")
    if seen.ended:
        print("  next        the same `moekit launch` goes on from the last checkpoint in the bucket")
    else:
        print(f"  next        moekit logs -f {run.path.name}")


def say_logs(said: dict[str, Any], follow: bool, lines: int) -> None:
    """Print a Job's log; with `follow` to its end."""
    api = hf_jobs_hub.client()
    for line in hf_jobs_hub.logs(api, said["job"], said["namespace"], follow, lines):
        print(line, flush=True)
    if follow:
        print(sentence(at_end(api, said["job"], said["namespace"])), file=sys.stderr)


def cancel(run: RunDir, said: dict[str, Any]) -> str:
    """End a run's Job; what was done, in a sentence.

    Raises:
        MoekitError: it has ended already, or the Hub does not do it.
    """
    api = hf_jobs_hub.client()
    seen = hf_jobs_hub.inspect(api, said["job"], said["namespace"])
    if seen.ended:
        raise error(f"run `{run.path.name}` has no Job to cancel: {sentence(seen)}", where=seen.url)
    hf_jobs_hub.cancel(api, said["job"], said["namespace"])
    return f"{run.path.name}: job {seen.id} cancelled; what it saved is in the bucket"


def pulled(run: RunDir, said: dict[str, Any]) -> str:
    """The command that brings a run's logs and metrics here, to be read as any run's."""
    source = f"hf://buckets/{said['bucket']}/runs/{run.path.name}"
    return f"hf buckets sync {source} {run.path} --exclude 'checkpoints/iter_*'"

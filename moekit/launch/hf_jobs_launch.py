"""`moekit launch --on hf-jobs`: what it costs is shown, a Job is asked for, and its log followed to its end.

What was submitted stands in `moekit-local/runs/NAME/hf_job.json`, beside the run's files: `status`, `logs` and `cancel`
ask the Hub for it (`hf_jobs_run.py`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moekit.launch import hf_jobs, hf_jobs_hub, hf_jobs_run
from moekit.launch.folders import write
from moekit.launch.missing import missing_secrets
from moekit.launch.run_files import is_of
from moekit.launch.rundir import RunDir, run_dir
from moekit.problems import MoekitError, Problem, error
from moekit.recipe.load import Loaded, show

if TYPE_CHECKING:
    from huggingface_hub import HfApi

NOT_KNOWN = "(the commit that the upload makes)"


@dataclass(frozen=True)
class Wishes:
    """What the command line says of a Job."""

    flavor: str
    image: str | None = None
    namespace: str | None = None
    bucket: str | None = None
    timeout_min: int | None = None
    yes: bool = False
    detach: bool = False


def requested(loaded: Loaded, wishes: Wishes, namespace: str, revision: str = NOT_KNOWN) -> hf_jobs.Request:
    """The Job that trains a recipe.

    Raises:
        MoekitError: with everything that keeps it from being one.
    """
    image = wishes.image or hf_jobs.IMAGE
    cluster = hf_jobs.cluster_of(wishes.flavor, image)
    timeout = hf_jobs.timeout_min(loaded.recipe, wishes.timeout_min)
    if found := hf_jobs.problems(loaded, cluster, timeout):
        raise MoekitError(*found)
    assert timeout is not None
    bucket = wishes.bucket or f"{namespace}/moekit"
    return hf_jobs.training(loaded, loaded.name, wishes.flavor, image, timeout, namespace, bucket, revision)


def dry_run(request: hf_jobs.Request, namespace: str) -> str:
    """The request as it would be sent, without the values of secrets."""
    return f"POST /api/jobs/{namespace}\n{json.dumps(request.body(), indent=1)}"


def probe(wishes: Wishes) -> int:
    """The ten-minute Job that counts devices; 0 where it sees all that the flavour has."""
    api = hf_jobs_hub.client()
    request = hf_jobs.probe(wishes.flavor, wishes.image)
    machine = hf_jobs_hub.machine(api, wishes.flavor)
    namespace = wishes.namespace or hf_jobs_hub.namespace_of(api)
    _confirm(_offer(machine, request), wishes.yes)
    job = hf_jobs_hub.submit(api, request, namespace, os.environ)
    print(f"job {job.id} submitted: {job.url}", file=sys.stderr)
    printed, end = _follow(api, job.id, namespace, None)
    counts = [line.strip() for line in printed if line.strip().isdecimal()]
    if end.stage != "COMPLETED":
        raise error(f"the probe ended as {end.stage}{f': {end.message}' if end.message else ''}", f"look at {end.url}")
    seen = int(counts[-1]) if counts else 0
    if seen != machine.gpus:
        raise error(f"the Job sees {seen} of the {machine.gpus} GPUs of `{wishes.flavor}`", "try another; tell the Hub")
    print(f"{wishes.flavor}: all {seen} GPUs are seen")
    return 0


def launch(loaded: Loaded, wishes: Wishes, shared_root: Path) -> int:
    """Submit a run as a Job and follow it; the exit code: 0, 1 where it did not end well, 130 after Ctrl-C.

    Raises:
        MoekitError: it cannot be one Job, something that it reads is not in the bucket, it has one already, a secret is
            not set here, or the Hub refuses.
    """
    first = requested(loaded, wishes, wishes.namespace or "NAMESPACE")
    if lacking := missing_secrets(loaded, os.environ):
        raise MoekitError(*lacking)
    run = run_dir(shared_root.absolute(), loaded.name)
    _refuse_another(run, loaded)
    api = hf_jobs_hub.client()
    namespace = wishes.namespace or hf_jobs_hub.namespace_of(api)
    _refuse_second(api, namespace, loaded.name)
    machine = hf_jobs_hub.machine(api, wishes.flavor)
    cluster = hf_jobs.cluster_of(wishes.flavor, first.image)
    if machine.gpus != cluster.gpus_per_node:
        raise error(f"`{wishes.flavor}` has {machine.gpus} GPUs now, and its name says {cluster.gpus_per_node}")
    bucket = wishes.bucket or f"{namespace}/moekit"
    _refuse_missing(api, bucket, loaded)
    _confirm([*_offer(machine, first), *_what_goes(first, bucket)], wishes.yes)
    files = hf_jobs.job_files(loaded, loaded.name, cluster)
    hf_jobs_hub.make_bucket(api, bucket)
    revision = hf_jobs_hub.put_files(api, hf_jobs.runs_repository(namespace), loaded.name, files)
    request = requested(loaded, wishes, namespace, revision)
    write(run.path, files)
    job = hf_jobs_hub.submit(api, request, namespace, os.environ)
    hf_jobs_run.record(run, job, namespace, bucket, request)
    print(f"{loaded.name}: job {job.id} submitted\n  page        {job.url}\n  directory   {show(run.path)}")
    print(f"  bucket      hf://buckets/{bucket}/runs/{loaded.name}")
    if wishes.detach:
        print(f"  next        moekit logs -f {loaded.name}")
        return 0
    _, end = _follow(api, job.id, namespace, loaded.name)
    print(f"{loaded.name}: {hf_jobs_run.sentence(end)}", file=sys.stderr)
    return 0 if end.stage == "COMPLETED" else 1


def _follow(api: HfApi, job: str, namespace: str, name: str | None) -> tuple[list[str], hf_jobs_hub.Seen]:
    """Print a Job's log to its end; its last lines, and what became of it. Ctrl-C ends the Job: it is paid for."""
    last: list[str] = []
    try:
        for line in hf_jobs_hub.logs(api, job, namespace, follow=True):
            print(line, flush=True)
            last = [*last[-99:], line]
        return last, hf_jobs_run.at_end(api, job, namespace)
    except KeyboardInterrupt:
        hf_jobs_hub.cancel(api, job, namespace)
        onward = "; the same command goes on from the last checkpoint in the bucket" if name else ""
        print(f"\njob {job} is cancelled{onward}", file=sys.stderr)
        raise SystemExit(130) from None


def _refuse_another(run: RunDir, loaded: Loaded) -> None:
    if run.recipe.is_file() and hf_jobs_run.record_of(run) is None:
        what = f"run `{loaded.name}` is there already, and is no Job"
        raise error(what, "give this one another name with `--name`", str(run.path))
    if run.recipe.is_file() and not is_of(run, loaded.recipe):
        what = f"run `{loaded.name}` is that of another recipe, or of this one before it was changed"
        raise error(what, "give this one another name with `--name`", str(run.recipe))


def _refuse_second(api: HfApi, namespace: str, name: str) -> None:
    """Two Jobs of a run would write over each other's checkpoints."""
    if jobs := hf_jobs_hub.jobs_of(api, namespace, {hf_jobs.LABEL: name}):
        what = f"run `{name}` has a Job already: {jobs[0].id} is {jobs[0].stage.lower()}"
        raise error(what, f"`moekit logs -f {name}` follows it, `moekit cancel {name}` ends it", jobs[0].url)


def _refuse_missing(api: HfApi, bucket: str, loaded: Loaded) -> None:
    lacking = hf_jobs_hub.missing_in_bucket(api, bucket, hf_jobs.brought(loaded.recipe))
    if lacking:
        raise MoekitError(
            *(
                Problem(
                    loaded.source.where("data.name", "data"),
                    f"the bucket `{bucket}` has no {path}, which the run reads",
                    f"`hf buckets sync SHARED_ROOT/{path} hf://buckets/{bucket}/{path}` puts it there",
                )
                for path in lacking
            )
        )


def _offer(machine: hf_jobs_hub.Machine, request: hf_jobs.Request) -> list[str]:
    hour, most = hf_jobs.cost(machine.usd_per_unit, machine.unit, request.timeout_s)
    return [
        f"machine     {machine.name}: {machine.text}",
        f"price       ${hour:.2f} an hour",
        f"timeout     {request.timeout_s // 60} min, so ${most:.2f} at most",
        f"image       {request.image}",
    ]


def _what_goes(request: hf_jobs.Request, bucket: str) -> list[str]:
    secrets = [f"secrets     {', '.join(request.secrets)}, from this shell"] if request.secrets else []
    return [f"bucket      {bucket}, mounted for data, logs and checkpoints", *secrets]


def _confirm(offer: list[str], yes: bool) -> None:
    """Show what is asked for, and ask.

    Raises:
        MoekitError: nobody says yes.
    """
    print("\n".join(f"  {line}" for line in offer), file=sys.stderr, flush=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise error("nobody is here to say yes to that price", "add `--yes`")
    print("Submit? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise error("not submitted", "nothing was sent")


def as_json(request: hf_jobs.Request, namespace: str, files: Mapping[str, str]) -> dict[str, Any]:
    """A dry run for a script."""
    return {"namespace": namespace, "request": request.body(), "files": dict(files)}

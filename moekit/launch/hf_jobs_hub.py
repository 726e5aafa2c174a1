"""What is asked of the Hugging Face Hub for Jobs, by its own client; its refusals in the user's words."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moekit.launch.hf_jobs import Request
from moekit.problems import MoekitError, error, shortened
from moekit.share import program

if TYPE_CHECKING:
    from huggingface_hub import HfApi, JobHardwareInfo, JobInfo

ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
_CLIENTS = ("huggingface_hub", "httpx", "httpx2", "requests")
"""What the client raises is of one of these, by version."""


@dataclass(frozen=True)
class Machine:
    """A flavour as the Hub offers it."""

    name: str
    text: str
    """What it is, for people."""
    gpus: int
    usd_per_unit: float
    unit: str


@dataclass(frozen=True)
class Seen:
    """A Job as the Hub tells it."""

    id: str
    stage: str
    """SCHEDULING, RUNNING, COMPLETED, CANCELED, ERROR or DELETED."""
    message: str
    url: str

    @property
    def ended(self) -> bool:
        """Whether it will not run any further."""
        return self.stage in ENDED


def client() -> HfApi:
    """The Hub's client.

    Raises:
        MoekitError: it is not installed, or too old to mount volumes.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from huggingface_hub import HfApi, Volume  # noqa: F401
    except ImportError:
        what = "Hugging Face Jobs need `huggingface_hub` 2 or newer"
        raise error(what, "run `pip install 'moekit[data]'`") from None
    return HfApi()


def namespace_of(api: HfApi) -> str:
    """Whose Jobs these are: the account that is logged in."""
    with asking():
        return str(api.whoami()["name"])


def machine(api: HfApi, flavor: str) -> Machine:
    """A flavour, with what it costs now.

    Raises:
        MoekitError: the Hub does not offer it.
    """
    with asking():
        offered = api.list_jobs_hardware()
    for one in offered:
        if one.name == flavor:
            return _machine(one)
    names = ", ".join(one.name for one in offered if one.accelerator)
    raise error(f"the Hub offers no machine `{shortened(flavor)}`", f"it has {names}")


def _machine(one: JobHardwareInfo) -> Machine:
    gpu = one.accelerator
    gpus = f"{gpu.quantity} {gpu.model} of {gpu.vram}, " if gpu else ""
    text = f"{gpus}{one.cpu}, {one.ram} of memory, {one.ephemeral_storage} of disk"
    number = int(gpu.quantity) if gpu and str(gpu.quantity).isdecimal() else 0
    return Machine(one.name, text, number, one.unit_cost_usd, one.unit_label)


def missing_in_bucket(api: HfApi, bucket: str, paths: Iterable[str]) -> list[str]:
    """Those of the paths that a bucket does not have: all of them where it is not there."""
    from huggingface_hub.errors import HfHubHTTPError

    found, wanted = [], list(paths)
    with asking():
        for path in wanted:
            try:
                found += [path] if any(True for _ in api.list_bucket_tree(bucket, path)) else []
            except HfHubHTTPError as refused:
                if refused.response.status_code != 404:
                    raise
    return [path for path in wanted if path not in found]


def make_bucket(api: HfApi, bucket: str) -> None:
    """Make a bucket, private, where it is not there."""
    with asking():
        api.create_bucket(bucket, private=True, exist_ok=True)


def put_files(api: HfApi, repository: str, folder: str, files: Mapping[str, str]) -> str:
    """Put a run's files into a private repository, which is made where it is not there; the commit that has them."""
    from huggingface_hub import CommitOperationAdd

    added = [CommitOperationAdd(f"{folder}/{name}", text.encode()) for name, text in files.items()]
    with asking():
        api.create_repo(repository, repo_type="dataset", private=True, exist_ok=True)
        done = api.create_commit(repository, added, commit_message=f"moekit: {folder}", repo_type="dataset")
    return str(done.oid)


def submit(api: HfApi, request: Request, namespace: str, environ: Mapping[str, str]) -> Seen:
    """Ask for a Job. Secrets are taken from the environment here, and are nowhere else."""
    from huggingface_hub import Volume

    volumes = [
        Volume(
            type=one.type,
            source=one.source,
            mount_path=one.mount_path,
            read_only=one.read_only,
            revision=one.revision,
            path=one.path,
        )
        for one in request.volumes
    ]
    with asking(secrets=[environ[name] for name in request.secrets]):
        info = api.run_job(
            image=request.image,
            command=list(request.command),
            secrets={name: environ[name] for name in request.secrets} or None,
            flavor=request.flavor,
            timeout=request.timeout_s,
            labels={**request.labels, "name": request.name},
            volumes=volumes or None,
            namespace=namespace,
        )
    return _seen(info)


def inspect(api: HfApi, job: str, namespace: str) -> Seen:
    """What a Job is now."""
    with asking():
        return _seen(api.inspect_job(job_id=job, namespace=namespace))


def jobs_of(api: HfApi, namespace: str, labels: Mapping[str, str]) -> list[Seen]:
    """The Jobs that wait or run and have some labels."""
    with asking():
        found = list(api.list_jobs(namespace=namespace, labels=dict(labels), status=["SCHEDULING", "RUNNING"]))
    return [_seen(info) for info in found]


def logs(api: HfApi, job: str, namespace: str, follow: bool, tail: int | None = None) -> Iterator[str]:
    """A Job's log, line by line; with `follow` until it ends."""
    with asking():
        yield from api.fetch_job_logs(job_id=job, namespace=namespace, follow=follow, tail=tail)


def cancel(api: HfApi, job: str, namespace: str) -> None:
    """End a Job."""
    with asking():
        api.cancel_job(job_id=job, namespace=namespace)


def _seen(info: JobInfo) -> Seen:
    stage = info.status.stage
    return Seen(info.id, str(getattr(stage, "value", stage)), info.status.message or "", info.url)


@contextmanager
def asking(secrets: Iterable[str] = ()) -> Iterator[None]:
    """Turn what the client raises into a message; no secret is in it."""
    try:
        yield
    except MoekitError:
        raise
    except Exception as failure:
        from huggingface_hub import errors

        if isinstance(failure, errors.LocalTokenNotFoundError):
            raise error("you are not logged in at the Hub", f"`{program('hf')} auth login`, or set HF_TOKEN") from None
        if type(failure).__module__.partition(".")[0] not in _CLIENTS and not isinstance(failure, OSError):
            raise
        raise _refused(failure, secrets) from None


def _refused(failure: Exception, secrets: Iterable[str]) -> MoekitError:
    response = getattr(failure, "response", None)
    code = getattr(response, "status_code", None)
    said = getattr(failure, "server_message", None) or " ".join(str(failure).split())
    for secret in secrets:
        said = said.replace(secret, "***") if secret else said
    said = said if len(said) <= 200 else said[:197] + "..."
    if code == 401:
        return error(
            "the Hub does not take your token", f"`{program('hf')} auth login` sets another; HF_TOKEN comes first"
        )
    if code == 402:
        return error(
            f"the Hub wants to be paid first: {said}", "Jobs need a positive balance, or a subscription's credit"
        )
    if code == 403:
        return error(f"your token may not do that: {said}", "it needs to write repositories and start Jobs")
    if code == 404:
        return error(f"the Hub does not find it: {said}", "it may be another account's: give `--namespace`")
    if code is not None:
        return error(f"the Hub answers with status {code}: {said}", "`hf jobs ps` shows what it has of yours")
    return error(f"the Hub gives no answer: {said}", "try the same again")

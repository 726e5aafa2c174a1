"""What `moekit init` asks: Slurm's clients, and one node by a short `srun`. Every call is bounded in time."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moekit import share
from moekit.cluster import init_node, init_text
from moekit.cluster.init_node import NodeReport
from moekit.cluster.init_text import Association, Config, Node, Partition, QosLimit
from moekit.launch import slurm
from moekit.problems import MoekitError, error

CLIENT_SLACK_S = 90.0
"""How much longer than it may wait for nodes an srun gets: it starts a job, and ends it."""

_WITHOUT = "`--fabric` goes on without asking a node"

NCCL_TESTS = "/opt/nccl-tests/build/alltoall_perf"
"""Where nccl-tests lie in AWS's images and on their nodes (handbook 2.1)."""

LOOKED_FOR = (NCCL_TESTS, "/opt/amazon/efa/lib", "/opt/amazon/ofi-nccl/lib")


@dataclass(frozen=True, slots=True)
class Site:
    """What Slurm says of the cluster and of the user."""

    config: Config
    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]
    has_pyxis: bool
    user: str
    default_account: str = ""
    associations: tuple[Association, ...] = ()
    qos_limits: tuple[tuple[str, QosLimit], ...] = ()


def ask_slurm() -> Site:
    """Everything that Slurm's clients say; five to nine short calls.

    Raises:
        MoekitError: Slurm's commands are not on PATH, or the controller gives no answer.
    """
    listed = _answer("sinfo", "--Node", "--noheader", f"--format={init_text.SINFO_FORMAT}")
    config = init_text.config(_answer("scontrol", "show", "config"))
    partitions = init_text.partitions(_answer("scontrol", "--oneliner", "show", "partition"))
    help_text = slurm.call(["srun", "--help"]).out
    user = getpass.getuser()
    account, associations, limits = "", [], {}
    if config.has_accounting and shutil.which("sacctmgr"):
        ask = ("sacctmgr", "--noheader", "--parsable2", "show")
        account = init_text.default_account(_said(*ask, "user", user, "format=DefaultAccount"))
        of_user = (f"user={user}", f"cluster={config.cluster}", f"format={init_text.ASSOCIATION_FIELDS}")
        associations = init_text.associations(_said(*ask, "association", *of_user))
        limits = init_text.qos_limits(_said(*ask, "qos", f"format={init_text.QOS_FIELDS}"))
    return Site(
        config=config,
        nodes=tuple(init_text.nodes(listed)),
        partitions=tuple(partitions),
        has_pyxis=init_text.has_pyxis(help_text),
        user=user,
        default_account=account,
        associations=tuple(associations),
        qos_limits=tuple(limits.items()),
    )


def ask_sizes(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """CPUs and MiB that jobs can have of each node, by one call."""
    return init_text.sizes(_answer("scontrol", "--oneliner", "show", "node", ",".join(names)))


def task_options(partition: str | None, account: str | None, qos: str | None, gres: str, memory_gib: int) -> list[str]:
    """What a short task with one GPU is asked with, on a node of so much memory; 0: the site does not say."""
    said = {"partition": partition, "account": account, "qos": qos, "gres": f"{gres}:1"}
    if memory_gib > 1:
        said["mem"] = "1024"  # MiB; some sites give a job that says nothing all of a node's
    return [f"--{name}={value}" for name, value in said.items() if value]


def ask_node(options: Sequence[str], wait_s: int) -> NodeReport:
    """What a node says of itself, by one task of a minute on the first that is free within `wait_s` seconds.

    Raises:
        MoekitError: no node was free, or Slurm refused, in its own words.
    """
    script = (share.folder("slurm") / "ask_node.sh").read_text(encoding="utf-8")
    said = run_on_node(options, wait_s, "bash", "-c", script, "ask_node.sh", *LOOKED_FOR)
    return init_node.report(said)


def run_on_node(options: Sequence[str], wait_s: int, *command: str) -> str:
    """The standard output of one task of a minute on a node; raises like `ask_node`."""
    name = f"moekit-init-{os.getpid()}"
    task = ["--nodes=1", "--ntasks=1", "--time=1", f"--immediate={wait_s}", f"--job-name={name}"]
    try:
        said = slurm.call(["srun", *options, *task, *command], wait_s + CLIENT_SLACK_S)
    except slurm.Unanswered:
        with contextlib.suppress(MoekitError):  # an allocation may outlive its srun
            slurm.call(["scancel", f"--name={name}", f"--user={getpass.getuser()}"])
        what = f"a task on a node took longer than {wait_s + CLIENT_SLACK_S:g} s"
        raise error(what, f"nodes that must start first need a longer `--wait`; {_WITHOUT}") from None
    if said.code:
        raise error(f"srun could not run on a node: {words(said.err)}", _srun_hint(said.err, wait_s))
    return said.out


def test_only(script: str) -> str:
    """What Slurm says of a batch script that it is asked to look at and not to queue: when it could start, and where.

    Raises:
        MoekitError: Slurm would refuse it, in its own words.
    """
    with tempfile.TemporaryDirectory(prefix="moekit-init-") as folder:
        path = Path(folder) / "job.sbatch"
        path.write_text(script, encoding="utf-8")
        said = slurm.call(["sbatch", "--test-only", str(path)])
    if said.code:
        raise error(f"sbatch would refuse a job with this profile: {words(said.err)}")
    return init_text.start_of_test(said.err + said.out)


def words(text: str) -> str:
    """A client's words on one line, without the names it puts in front of each."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for name in ("srun", "sbatch", "sinfo", "scontrol", "sacctmgr"):
        lines = [line.removeprefix(f"{name}: ").removeprefix("error: ") for line in lines]
    kept = [line for line in lines if not line.endswith("queued and waiting for resources")]
    return "; ".join(kept) or "it says nothing"


def _answer(*command: str) -> str:
    """What a client prints; one that fails is an error."""
    said = slurm.call(command)
    if said.code:
        hint = "`scontrol ping` says whether Slurm's controller is up"
        raise error(f"`{command[0]}` has no answer from Slurm: {words(said.err)}", hint)
    return said.out


def _said(*command: str) -> str:
    """What a client prints; nothing where it fails: accounting is not needed."""
    try:
        return slurm.call(command).out
    except MoekitError:
        return ""


def _srun_hint(stderr: str, wait_s: int) -> str:
    if "busy" in stderr or "not available" in stderr:
        return f"no node was free within {wait_s} s: wait longer with `--wait`; {_WITHOUT}"
    if "account" in stderr.lower() or "qos" in stderr.lower():
        return (
            "name one that you may use with `--account` or `--qos`; `sacctmgr show association user=$USER` lists them"
        )
    return f"another partition may do, `--partition`; {_WITHOUT}"

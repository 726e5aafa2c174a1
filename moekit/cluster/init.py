"""`moekit init`: ask a cluster and one of its nodes, write the profile, and try it with Slurm."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moekit import share
from moekit.cluster import init_choice, init_site
from moekit.cluster.init_choice import Kind
from moekit.cluster.init_node import NodeReport
from moekit.cluster.init_profile import Answers, Line, profile_lines, profile_text
from moekit.cluster.init_site import Site
from moekit.cluster.profile import Cluster, parse_cluster
from moekit.problems import MoekitError, Problem, error
from moekit.recipe.load import load

TRIED_RECIPE = "first_moe_smoke"
"""Whose job `sbatch --test-only` is asked about: it needs neither data nor a tokenizer."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """The command's options; None: not given. `none` as a path means that there is none."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpu: str | None = None
    fabric: str | None = None
    container: str | None = None
    shared_root: str | None = None
    image: str | None = None
    megatron_path: str | None = None
    python: str | None = None
    setup_script: str | None = None
    wait_s: int = 60


@dataclass(frozen=True, slots=True)
class Question:
    """What a person must say, where no option does."""

    name: str
    text: str
    default: str

    @property
    def option(self) -> str:
        """The command's option that answers it."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(slots=True)
class Found:
    """What `moekit init` found, wrote and tried."""

    path: Path
    lines: list[Line]
    cluster: Cluster
    notes: list[str] = field(default_factory=list)
    """What a person should know, one sentence each."""
    test_only: str = ""
    """When the tried job could start, as Slurm says."""
    host: str = ""
    """The node that `srun hostname` ran on; empty: none was free."""
    problems: list[Problem] = field(default_factory=list)
    """What did not work with the profile that was written."""


Ask = Callable[[Question], str]
"""Puts a question to a person, who may take the default."""
Tell = Callable[[str], None]


def init(path: Path | None, wishes: Wishes, *, force: bool, ask: Ask | None, tell: Tell) -> Found:
    """Write a profile of the cluster that this machine belongs to, and try it. `ask` is None where nobody can answer.

    Raises:
        MoekitError: Slurm or a node gives no answer, a needed option is missing, the file exists. Nothing was written.
    """
    if path:
        _refuse_existing(path, force)
    if wishes.wait_s == 0 and wishes.fabric is None:
        raise error("`--wait 0` asks no node, and the network between nodes must be known", "say it with `--fabric`")
    tell("asking Slurm for partitions, nodes, limits and accounts")
    site = init_site.ask_slurm()
    path = path or Path(f"{site.config.cluster or 'cluster'}.yaml")
    _refuse_existing(path, force)
    kind = init_choice.choose(site, wishes.partition, wishes.gpu)
    container = wishes.container or ("pyxis" if site.has_pyxis else "none")
    if ask is None:
        _refuse_open(questions(wishes, container, kind, None, node_can_say=wishes.wait_s > 0))
    sizes = init_site.ask_sizes([node.name for node in kind.nodes])
    notes: list[str] = []
    report = _node_report(site, kind, wishes, notes, tell)
    answers = _answers(wishes, container, kind, report, ask)
    lines = profile_lines(site, kind, sizes, report, answers)
    text = profile_text(lines, _schema(path), _heading(site, kind))
    cluster = parse_cluster(text, str(path))
    _write(path, text, force)
    found = Found(path, lines, cluster, notes)
    _try(found, wishes.wait_s, tell)
    return found


def questions(
    wishes: Wishes, container: str, kind: Kind, report: NodeReport | None, *, node_can_say: bool = False
) -> list[Question]:
    """What neither an option nor the cluster says, each with a default; `node_can_say` before a node was asked."""
    root = wishes.shared_root or _shared_root(report)
    asked = [Question("shared_root", "folder that all nodes share, for runs, data and tokenizers", root)]
    if container == "pyxis":
        asked.append(Question("image", "squashfs image to train in", f"{root}/images/pytorch-26.06.sqsh"))
    checkout = "Megatron-LM checkout that all nodes see, or `none` for the megatron-core that python finds"
    asked.append(Question("megatron_path", checkout, f"{root}/Megatron-LM" if container == "pyxis" else "none"))
    if init_choice.gpu_model(kind.gpus, report)[0] is None and not node_can_say:
        models = ", ".join(sorted(init_choice.MODELS))
        asked.append(Question("gpu", f"GPU model, which neither gres nor nvidia-smi names: {models}", ""))
    return [question for question in asked if getattr(wishes, question.name) is None]


def _refuse_existing(path: Path, force: bool) -> None:
    if path.is_dir():
        raise error(f"`{path}` is a directory", "name a file")
    if os.path.lexists(path) and not force:
        raise error(f"`{path}` exists", "`--force` writes over it; or name another file")


def _refuse_open(open_questions: Sequence[Question]) -> None:
    """Without a terminal nobody can answer: all that is open, each with its option."""
    problems = [
        Problem("", f"`{one.option}` is not given, and there is no terminal to ask on: {one.text}", _example(one))
        for one in open_questions
    ]
    if problems:
        raise MoekitError(*problems)


def _example(question: Question) -> str:
    return f"for example `{question.option} {question.default}`" if question.default else ""


def _shared_root(report: NodeReport | None) -> str:
    """A folder on a file system that both this machine and the node mount, else in the home directory."""
    for folder, _ in report.shared if report else ():
        if os.access(folder, os.W_OK) and folder != str(Path.home()):
            return f"{folder.rstrip('/')}/moekit"
    return str(Path.home() / "moekit")


def _node_report(site: Site, kind: Kind, wishes: Wishes, notes: list[str], tell: Tell) -> NodeReport | None:
    """What a node says; without one, only where `--fabric` says what is needed of it."""
    if wishes.wait_s == 0:
        notes.append("no node was asked: the profile names no network interfaces")
        return None
    charged = wishes.account or init_choice.account(site, kind.partition)[0]
    quality = wishes.qos or init_choice.qos(site, kind.partition, charged)[0]
    memory_gib = min(node.memory_mib for node in kind.nodes) // 1024
    options = init_site.task_options(kind.partition.name, charged, quality, kind.gpus.gres, memory_gib)
    tell(f"asking a node of `{kind.partition.name}` by srun, for {wishes.wait_s} s at most")
    try:
        return init_site.ask_node(options, wishes.wait_s)
    except MoekitError as failed:
        if wishes.fabric is None:
            raise
        notes.append(f"no node was asked: {failed.problems[0].what}")
        return None


def _answers(wishes: Wishes, container: str, kind: Kind, report: NodeReport | None, ask: Ask | None) -> Answers:
    given, missing = wishes, questions(wishes, container, kind, report)
    while missing:  # one by one: a default follows from the answers before
        if ask is None:
            _refuse_open(missing)
        else:
            answer: dict[str, Any] = {missing[0].name: ask(missing[0])}
            given = replace(given, **answer)
        missing = questions(given, container, kind, report)
    said = {name: getattr(given, name) for name in ("image", "megatron_path", "setup_script")}
    paths = {name: None if value in (None, "none") else os.path.expanduser(value) for name, value in said.items()}  # noqa: PTH111
    return Answers(
        shared_root=str(Path(str(given.shared_root)).expanduser()),
        container=container,
        python=given.python,
        gpu=given.gpu,
        fabric=given.fabric,
        account=given.account,
        qos=given.qos,
        **paths,
    )


def _schema(path: Path) -> str:
    """Where editors find the schema, from the profile's folder."""
    return os.path.relpath(share.folder("slurm") / "clusters" / "schema.json", path.parent)


def _heading(site: Site, kind: Kind) -> list[str]:
    who = f"Cluster {site.config.cluster} (Slurm {site.config.version}), by `moekit init`"
    said = [
        f"{who}: each value says where it comes from. Change what is wrong.",
        "Commands take this file with `--profile`, or in MOEKIT_PROFILE.",
    ]
    others = [f"`{other.partition.name}` {len(other.nodes)} x {other.gpus}" for other in init_choice.others(site, kind)]
    return [*said, f"Other GPU nodes here (`--partition`, `--gpu`): {', '.join(others)}."] if others else said


def _write(path: Path, text: str, force: bool) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        _refuse_existing(path, force)  # nobody else's, made while a person was thinking
        part.replace(path)
    except OSError as reason:
        raise error(f"cannot write `{path}`: {(reason.strerror or str(reason)).lower()}") from None
    finally:
        part.unlink(missing_ok=True)


def _try(found: Found, wait_s: int, tell: Tell) -> None:
    """What Slurm says of a real job's script, and a task of a minute on a node."""
    from moekit.launch.script import slurm_files

    cluster, path = found.cluster, found.path
    tell(f"asking sbatch whether it would take the job of `{TRIED_RECIPE}`")
    try:
        found.test_only = init_site.test_only(slurm_files(load(TRIED_RECIPE), TRIED_RECIPE, cluster)["job.sbatch"])
    except MoekitError as refused:
        hint = f"{path} is written: correct it there"
        found.problems += [replace(problem, hint=problem.hint or hint) for problem in refused.problems]
    if wait_s == 0:
        return
    tell("running `hostname` on a node, a minute at most")
    script = 'hostname; if [[ -d $1 && -w $1 ]]; then echo "seen"; fi'
    options = init_site.task_options(
        cluster.partition, cluster.account, cluster.qos, cluster.gres, cluster.memory_gib or 0
    )
    try:
        said = init_site.run_on_node(options, wait_s, "bash", "-c", script, "hostname", cluster.shared_root).split()
    except MoekitError as failed:
        by_hand = shlex.join(["srun", *options, "--time=1", "hostname"])
        found.notes.append(f"{failed.problems[0].what}; try it later: {by_hand}")
        return
    found.host = said[0] if said else ""
    if "seen" not in said[1:]:
        make = f"mkdir -p {shlex.quote(cluster.shared_root)}"
        found.notes.append(f"{found.host} cannot write to {cluster.shared_root}: `{make}`, where all nodes see it")

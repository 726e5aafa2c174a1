"""From what a cluster and one of its nodes say to the text of a profile, each value with where it comes from. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moekit import share
from moekit.cluster import init_node
from moekit.cluster.init_choice import Kind, account, cpu_partition, gpu_model, most_nodes, most_time, qos
from moekit.cluster.init_node import NodeReport
from moekit.cluster.init_site import NCCL_TESTS, Site
from moekit.problems import CONTROL

_NO_TEXT = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
"""Words that one YAML reader or another takes for something else."""

TIME_LIMIT_MIN = 120
"""Minutes a job gets where nobody says: those of the shipped profiles."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What only a person can say; None: not said, the rest of the profile decides."""

    shared_root: str
    container: str
    image: str | None = None
    megatron_path: str | None = None
    python: str | None = None
    setup_script: str | None = None
    gpu: str | None = None
    fabric: str | None = None
    account: str | None = None
    qos: str | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A field of the profile."""

    name: str
    value: object
    """Text, a number or None; a tuple is a list below the name, a mapping its entries, each (value, why)."""
    why: str


def profile_text(lines: Sequence[Line], schema: str, heading: Sequence[str]) -> str:
    """The YAML of a profile: a field a line, behind it where its value comes from."""
    out = [f"# yaml-language-server: $schema={schema}", *(f"# {_plain(line)}" for line in heading)]
    for line in lines:
        if line.name in ("container", "library_path", "environment"):
            out.append("")
        if isinstance(line.value, tuple):
            out += [_commented(f"{line.name}:", line.why), *(f"  - {_scalar(item)}" for item in line.value)]
        elif isinstance(line.value, Mapping):
            out.append(_commented(f"{line.name}:", line.why))
            out += [_commented(f"  {name}: {_scalar(value)}", why) for name, (value, why) in line.value.items()]
        else:
            out.append(_commented(f"{line.name}: {_scalar(line.value)}", line.why))
    return "\n".join(out) + "\n"


def profile_lines(
    site: Site, kind: Kind, sizes: Mapping[str, tuple[int, int]], report: NodeReport | None, answers: Answers
) -> list[Line]:
    """Every field that `moekit init` writes, in the order of the profile."""
    fabric, why_fabric = (
        (answers.fabric, "as you said")
        if answers.fabric or report is None
        else init_node.fabric(report, kind.gpus.count)
    )
    gpu, why_gpu = (answers.gpu, "as you said") if answers.gpu else gpu_model(kind.gpus, report)
    return [
        *_slurm_lines(site, kind, answers),
        Line(
            "nodes", len(kind.nodes), f"sinfo: the nodes of `{kind.partition.name}` with {kind.gpus}{_unusable(kind)}"
        ),
        Line("gpus_per_node", kind.gpus.count, f"sinfo: gres {kind.gpus}"),
        Line("gpu", gpu, why_gpu),
        Line("gres", kind.gpus.gres, "sinfo: what a job asks for, up to the number"),
        *_size_lines(kind, sizes),
        Line("fabric", fabric, why_fabric),
        *_limit_lines(site, kind, answers),
        *_software_lines(site, answers, report),
        *_network_lines(fabric or "none", gpu or "", answers, report),
    ]


def _slurm_lines(site: Site, kind: Kind, answers: Answers) -> Iterator[Line]:
    partition = kind.partition
    yield Line("name", site.config.cluster or "cluster", "scontrol show config: ClusterName")
    is_default = "the cluster's default" if partition.is_default else "not the cluster's default"
    yield Line("partition", partition.name, f"sinfo: {len(kind.nodes)} nodes with {kind.gpus} each; {is_default}")
    yield Line("cpu_partition", *cpu_partition(site, kind))
    charged, why = (answers.account, "as you said") if answers.account else account(site, partition)
    yield Line("account", charged, why)
    yield Line("qos", *((answers.qos, "as you said") if answers.qos else qos(site, partition, charged)))


def _size_lines(kind: Kind, sizes: Mapping[str, tuple[int, int]]) -> Iterator[Line]:
    known = [sizes[node.name] for node in kind.nodes if node.name in sizes]
    known = known or [(node.cpus, node.memory_mib) for node in kind.nodes]
    cpus, memory_mib = min(cpus for cpus, _ in known), min(memory for _, memory in known)
    alike = "the fewest of them" if len({cpus for cpus, _ in known}) > 1 else "of each node"
    limit = kind.partition.max_cpus_per_node
    if limit is not None and limit < cpus:
        yield Line("cpus_per_task", limit, f"scontrol show partition: MaxCPUsPerNode; the nodes have {cpus}")
    else:
        yield Line("cpus_per_task", cpus, f"scontrol show node: CPUEfctv, {alike}")
    if memory_mib >= 1024:
        yield Line("memory_gib", memory_mib // 1024, "scontrol show node: RealMemory less MemSpecLimit")
    else:
        yield Line("memory_gib", None, "scontrol show node: RealMemory is not set here")


def _limit_lines(site: Site, kind: Kind, answers: Answers) -> Iterator[Line]:
    quality = answers.qos or qos(site, kind.partition, answers.account or account(site, kind.partition)[0])[0]
    most_min, why = most_time(site, kind.partition, quality)
    usual_min = TIME_LIMIT_MIN if most_min is None else min(TIME_LIMIT_MIN, most_min)
    yield Line("time_limit_min", usual_min, "moekit's own, for a recipe that says none")
    yield Line("max_time_min", most_min, why)
    yield Line("max_nodes", *most_nodes(site, kind, quality))
    yield Line("max_array_tasks", site.config.max_array_size or None, "scontrol show config: MaxArraySize")


def _software_lines(site: Site, answers: Answers, report: NodeReport | None) -> Iterator[Line]:
    offered = f"`srun --help` {'offers' if site.has_pyxis else 'does not offer'} --container-image"
    chosen = (answers.container == "pyxis") != site.has_pyxis
    yield Line("container", answers.container, f"as you said; {offered}" if chosen else offered)
    if answers.container == "pyxis":
        yield Line("image", answers.image, "as you said")
    else:
        yield Line("setup_script", answers.setup_script, "as you said" if answers.setup_script else "none was named")
        yield Line("python", answers.python or "python", "as you said" if answers.python else "by name, on the nodes")
    yield Line("shared_root", answers.shared_root, f"as you said{_file_system(answers.shared_root, report)}")
    if answers.megatron_path:
        yield Line("megatron_path", answers.megatron_path, "as you said")
    else:
        yield Line("megatron_path", None, "as you said: the megatron-core that python finds")
    if answers.container == "none" and report and NCCL_TESTS in report.files:
        yield Line("nccl_tests", NCCL_TESTS, f"{report.host} has it")
    else:
        yield Line("nccl_tests", None, "the path of its `alltoall_perf`; nobody was asked")
    for name in ("transformer_engine", "torch"):
        yield Line(name, None, "its version; `moekit check --real --in-image` asks the image")


def _network_lines(fabric: str, gpu: str, answers: Answers, report: NodeReport | None) -> Iterator[Line]:
    """The environment of the shipped profile for such a network, with what this node says put in."""
    shipped = {"efa": "aws-p5", "ib": "h100-ib"}.get(fabric)
    names = [name for name in (gpu if gpu in ("gb200", "gb300") else None, shipped) if name]
    variables = {name: pair for profile in names for name, pair in shipped_variables(profile).items()}
    variables.setdefault("NCCL_DEBUG", ("INFO", "the log then names the network that NCCL uses"))
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"):
        variables.pop(name, None)  # of another cluster's nodes
    if report:
        variables |= init_node.variables(report, fabric)
    if fabric == "efa" and answers.container == "pyxis":
        folders = shipped_library_path("aws-p5")
        yield Line("library_path", folders, "of the shipped aws-p5: where the EFA image has them (handbook 2.2)")
    elif fabric == "efa" and report:
        found = tuple(name for name in shipped_library_path("aws-p5") if name in report.files)
        if found:
            yield Line("library_path", found, f"{report.host} has them")
    yield Line("environment", variables, "of the training processes")


def shipped_variables(profile: str) -> dict[str, tuple[str, str]]:
    """The environment of a shipped profile: for each variable its value, and the comment behind it."""
    _, _, block = _shipped(profile).partition("\nenvironment:")
    rows = re.findall(r"^  (\w+): (.*?)(?: +# (.*))?$", block, re.MULTILINE)
    return {name: (value, f"shipped {profile}: {why}") for name, value, why in rows}


def shipped_library_path(profile: str) -> tuple[str, ...]:
    """The folders that a shipped profile puts in front of LD_LIBRARY_PATH."""
    _, _, block = _shipped(profile).partition("\nlibrary_path:")
    found = re.match(r".*\n((?:  - .*\n)+)", block)
    return tuple(line.strip(" -") for line in found[1].splitlines()) if found else ()


def _shipped(profile: str) -> str:
    return (share.folder("slurm") / "clusters" / f"{profile}.yaml").read_text(encoding="utf-8")


def _unusable(kind: Kind) -> str:
    out = [node.name for node in kind.nodes if not node.usable]
    return f"; not in service: {', '.join(out[:4])}{', ...' * (len(out) > 4)}" if out else ""


def _file_system(folder: str, report: NodeReport | None) -> str:
    """What kind of file system a folder lies on, as a node has it mounted."""
    below = [(mount, kind) for mount, kind in (report.shared if report else ()) if f"{folder}/".startswith(f"{mount}/")]
    mount, kind = max(below, key=lambda pair: len(pair[0]), default=("", ""))
    return f"; {kind} at {mount} on {report.host}" if mount and report else ""


def _commented(text: str, why: str) -> str:
    return f"{text:<35} # {_plain(why)}" if why else text


def _scalar(value: object) -> str:
    """A value as YAML: plain where that is read back as the same text."""
    if value is None:
        return "null"
    text = str(value)
    if isinstance(value, int) or (re.fullmatch(r"[\w/.^=][\w/.^=,:#+@-]*", text) and text.lower() not in _NO_TEXT):
        return text
    return json.dumps(text, ensure_ascii=False)


def _plain(text: str) -> str:
    return CONTROL.sub("?", text)

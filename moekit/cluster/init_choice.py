"""Which partition, account and limits a profile gets where Slurm offers several, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moekit.cluster.init_node import NodeReport
from moekit.cluster.init_site import Site
from moekit.cluster.init_text import Gpus, Node, Partition, QosLimit, minutes
from moekit.problems import did_you_mean, error, shortened

MODELS = ("gb300", "gb200", "b300", "b200", "h200", "h100", "a100")
"""What `gpu` of a profile can be; a longer name first, since it holds a shorter one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The nodes of a partition that have the same GPUs."""

    partition: Partition
    gpus: Gpus
    nodes: tuple[Node, ...]


def kinds(site: Site) -> list[Kind]:
    """Every kind of GPU node, the one to take first: in a partition that is up, in service, the default, most nodes."""
    found = []
    for partition in site.partitions:
        here = [node for node in site.nodes if node.partition == partition.name]
        for gpus in dict.fromkeys(node.gpus for node in here if node.gpus):
            found.append(Kind(partition, gpus, tuple(node for node in here if node.gpus == gpus)))
    return sorted(found, key=_rank)


def _rank(kind: Kind) -> tuple[bool, bool, bool, int]:
    in_service = sum(node.usable for node in kind.nodes)
    return not kind.partition.is_up, not in_service, not kind.partition.is_default, -in_service


def choose(site: Site, partition: str | None = None, gpu: str | None = None) -> Kind:
    """The kind of node to write a profile for; `gpu` picks one where several are there.

    Raises:
        MoekitError: no partition has GPUs, or the one that is asked for; it lists what there is.
    """
    found = kinds(site)
    if partition is None:
        if not found:
            raise error("no partition of this cluster has GPUs", f"there are {_listed(site)}")
        return _with(gpu, found)
    of_it = [kind for kind in found if kind.partition.name == partition]
    if not of_it:
        names = [known.name for known in site.partitions]
        what = f"there is no partition `{shortened(partition)}`"
        if partition in names:
            what = f"partition `{partition}` has no GPUs"
        raise error(what, did_you_mean(partition, names) if partition not in names else f"there are {_listed(site)}")
    return _with(gpu, of_it)


def _with(gpu: str | None, found: list[Kind]) -> Kind:
    return next((kind for kind in found if gpu and _model(kind.gpus.type) == gpu), found[0])


def others(site: Site, kind: Kind) -> list[Kind]:
    """The kinds of node that the profile is not for."""
    return [other for other in kinds(site) if other != kind]


def cpu_partition(site: Site, kind: Kind) -> tuple[str | None, str]:
    """The partition for work without GPUs, and why."""
    without = {
        partition: len(here)
        for partition in site.partitions
        if (here := [node for node in site.nodes if node.partition == partition.name])
        and partition.is_up
        and not any(node.gpus for node in here)
    }
    if not without:
        return kind.partition.name, "sinfo: no partition is without GPUs; a job there asks for none"
    best = max(without, key=lambda partition: (partition.is_default, without[partition]))
    return best.name, f"sinfo: {without[best]} nodes without GPUs"


def account(site: Site, partition: Partition) -> tuple[str | None, str]:
    """The account to charge, and why."""
    if not site.config.has_accounting:
        return None, "scontrol show config: no accounting here"
    mine = list(dict.fromkeys(a.account for a in site.associations if a.partition in ("", partition.name)))
    allowed = [name for name in mine if partition.takes(name)]
    default = site.default_account
    if default and (default in allowed or not mine):
        return default, f"sacctmgr: the default account of {site.user}"
    if allowed:
        return allowed[0], f"sacctmgr: of the accounts of {site.user}, the first that `{partition.name}` takes"
    return None, f"sacctmgr names no account of {site.user} that `{partition.name}` takes"


def qos(site: Site, partition: Partition, charged: str | None) -> tuple[str | None, str]:
    """The quality of service, and why."""
    if not site.config.has_accounting:
        return None, "scontrol show config: no accounting here"
    for association in site.associations:
        if association.account == charged and association.partition in ("", partition.name):
            default, allowed = association.default_qos, [name for name in association.qos if partition.takes_qos(name)]
            if default and partition.takes_qos(default):
                return default, f"sacctmgr: the default QOS of `{charged}`"
            if (default or partition.allowed_qos) and allowed:
                return allowed[0], f"sacctmgr: of the QOS of `{charged}`, the first that `{partition.name}` takes"
    return None, "sacctmgr: no default QOS is set; Slurm takes the site's"


def most_time(site: Site, partition: Partition, quality: str | None) -> tuple[int | None, str]:
    """The most minutes of a job, and who says so."""
    said = f"scontrol show partition: MaxTime={partition.max_time}"
    limits = [(minutes(partition.max_time), said)]
    limits += [
        (limit.time_min, f"sacctmgr show qos: MaxWall of `{name}`") for name, limit in _of(site, partition, quality)
    ]
    return _least(limits, said)


def most_nodes(site: Site, kind: Kind, quality: str | None) -> tuple[int | None, str]:
    """The most nodes of a job, where that is not all of them, and who says so."""
    said = f"scontrol show partition: MaxNodes={kind.partition.max_nodes or 'UNLIMITED'}"
    limits = [(kind.partition.max_nodes, said)]
    for name, limit in _of(site, kind.partition, quality):
        by_gpus = None if limit.gpus is None else max(1, limit.gpus // kind.gpus.count)
        limits += [(most, f"sacctmgr show qos: MaxTRES of `{name}`") for most in (limit.nodes, by_gpus)]
    most, why = _least(limits, said)
    return (None, f"{why}, and there are {len(kind.nodes)}") if most and most > len(kind.nodes) else (most, why)


def _of(site: Site, partition: Partition, quality: str | None) -> list[tuple[str, QosLimit]]:
    """The limits of the qualities of service that hold for a job: its own, and the partition's."""
    limits = dict(site.qos_limits)
    return [(name, limits[name]) for name in dict.fromkeys((quality, partition.qos)) if name and name in limits]


def _least(limits: Iterable[tuple[int | None, str]], otherwise: str) -> tuple[int | None, str]:
    return min(((most, why) for most, why in limits if most is not None), default=(None, otherwise))


def gpu_model(gpus: Gpus, report: NodeReport | None) -> tuple[str | None, str]:
    """The GPU model by what Slurm or nvidia-smi calls it, and which of them says so; None: neither name is known."""
    for name in report.gpus if report else ():
        if model := _model(name):
            return model, f"nvidia-smi on {report.host if report else ''}: {name}"
    return _model(gpus.type), f"sinfo: gres type `{gpus.type}`"


def _model(name: str) -> str | None:
    return next((model for model in MODELS if model in name.lower()), None)


def _listed(site: Site) -> str:
    return ", ".join(_counted(site)) or "no partitions at all"


def _counted(site: Site) -> Iterator[str]:
    for partition in site.partitions:
        here = [node for node in site.nodes if node.partition == partition.name]
        gpus: Iterable[str] = dict.fromkeys(str(node.gpus) for node in here if node.gpus)
        yield f"`{partition.name}` ({len(here)} nodes, {', '.join(gpus) or 'no GPUs in their gres'})"

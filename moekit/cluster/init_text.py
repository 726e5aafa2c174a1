"""What `moekit init` reads: the texts of sinfo, scontrol, sacctmgr, sbatch and srun, as values. Pure.

Read from a real Slurm 22.05 and a real 24.11.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

SINFO_FORMAT = "%N|%R|%t|%c|%m|%G"
"""What `sinfo --Node` is asked for: node, partition, state, CPUs, MiB, gres; one line a node and partition."""
ASSOCIATION_FIELDS = "Account,Partition,QOS,DefaultQOS"
QOS_FIELDS = "Name,MaxWall,MaxTRES"

_UNLIMITED = ("", "UNLIMITED", "infinite", "INFINITE", "NONE", "n/a", "N/A", "(null)", "Partition_Limit")
_OUT_OF_USE = re.compile(r"down|drain|drng|fail|maint|unk|inval|futr", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a node as its gres says them."""

    type: str
    """Slurm's word for the model; empty where the site gives none."""
    count: int

    @property
    def gres(self) -> str:
        """What `--gres` asks for, up to the number."""
        return f"gpu:{self.type}" if self.type else "gpu"

    def __str__(self) -> str:
        return f"{self.gres}:{self.count}"


@dataclass(frozen=True, slots=True)
class Node:
    """A node in one of its partitions."""

    name: str
    partition: str
    state: str
    cpus: int
    memory_mib: int
    gpus: Gpus | None

    @property
    def usable(self) -> bool:
        """Whether it can take jobs, now or later."""
        return not (_OUT_OF_USE.search(self.state) or self.state.endswith("*"))


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition and what it lets a job have; None is no limit."""

    name: str
    is_default: bool
    is_up: bool
    max_time: str
    """As Slurm says it: `7-00:00:00`."""
    max_nodes: int | None
    max_cpus_per_node: int | None
    qos: str
    """The partition's own QOS, whose limits hold too; empty: none."""
    allowed_accounts: tuple[str, ...]
    """Empty: all but those denied."""
    allowed_qos: tuple[str, ...]
    denied: tuple[str, ...] = ()
    """Accounts and qualities of service that it does not take."""

    def takes(self, account: str) -> bool:
        """Whether an account's jobs may run here."""
        return account not in self.denied and (not self.allowed_accounts or account in self.allowed_accounts)

    def takes_qos(self, name: str) -> bool:
        """Whether jobs of a quality of service may run here."""
        return name not in self.denied and (not self.allowed_qos or name in self.allowed_qos)


@dataclass(frozen=True, slots=True)
class Config:
    """What holds for the whole cluster."""

    cluster: str
    version: str
    max_array_size: int | None
    has_accounting: bool


@dataclass(frozen=True, slots=True)
class Association:
    """An account that the user may charge, with its qualities of service."""

    account: str
    partition: str
    """The only partition it is for; empty: all."""
    qos: tuple[str, ...]
    default_qos: str


@dataclass(frozen=True, slots=True)
class QosLimit:
    """What a quality of service lets one job have; None is no limit."""

    time_min: int | None
    nodes: int | None
    gpus: int | None


def nodes(text: str) -> list[Node]:
    """The lines of `sinfo --Node --noheader --format=SINFO_FORMAT`; a site's notices between them are none."""
    found = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 6 and fields[3].rstrip("+").isdigit():
            name, partition, state, cpus, memory, gres = fields
            found.append(Node(name, partition, state, int(cpus.rstrip("+")), _number(memory) or 0, gres_gpus(gres)))
    return found


def gres_gpus(gres: str) -> Gpus | None:
    """The whole GPUs of a gres text, the largest group of one type: `gpu:h100:8(S:0-1),nvme:2`; None: no GPU."""
    found = []
    for entry in re.sub(r"\(.*?\)", "", gres).split(","):
        name, *middle = [word for word in entry.strip().split(":") if word != "no_consume"]
        count, model = middle[-1] if middle else "", ":".join(middle[:-1])
        if name == "gpu" and count.isdigit() and not re.search(r"\d+g\.", model):  # 1g.10gb: a slice of a GPU
            found.append(Gpus(model, int(count)))
    return max(found, key=lambda gpus: gpus.count, default=None)


def partitions(text: str) -> list[Partition]:
    """The lines of `scontrol --oneliner show partition`."""
    found = []
    for said in map(_fields, text.splitlines()):
        if "PartitionName" in said:
            found.append(
                Partition(
                    name=said["PartitionName"],
                    is_default=said.get("Default") == "YES",
                    is_up=said.get("State", "UP") == "UP",
                    max_time=said.get("MaxTime", ""),
                    max_nodes=_number(said.get("MaxNodes", "")),
                    max_cpus_per_node=_number(said.get("MaxCPUsPerNode", "")),
                    qos="" if said.get("QoS", "") in _UNLIMITED else said["QoS"],
                    allowed_accounts=_names(said.get("AllowAccounts", "ALL")),
                    allowed_qos=_names(said.get("AllowQos", "ALL")),
                    denied=_names(said.get("DenyAccounts", "")) + _names(said.get("DenyQos", "")),
                )
            )
    return found


def sizes(text: str) -> dict[str, tuple[int, int]]:
    """From `scontrol --oneliner show node`, what jobs can have of each node: CPUs, and memory in MiB."""
    found = {}
    for said in map(_fields, text.splitlines()):
        cpus = _number(said.get("CPUEfctv", "")) or _number(said.get("CPUTot", ""))
        if "NodeName" in said and cpus:
            kept = _number(said.get("MemSpecLimit", "")) or 0
            found[said["NodeName"]] = (cpus, (_number(said.get("RealMemory", "")) or 0) - kept)
    return found


def config(text: str) -> Config:
    """What `scontrol show config` says."""
    said = dict(re.findall(r"^(\w+)\s*= (.*?)\s*$", text, re.MULTILINE))
    return Config(
        cluster=said.get("ClusterName", ""),
        version=said.get("SLURM_VERSION", ""),
        max_array_size=_number(said.get("MaxArraySize", "")),
        has_accounting=said.get("AccountingStorageType", "").endswith("slurmdbd"),
    )


def default_account(text: str) -> str:
    """From `sacctmgr --noheader --parsable2 show user NAME format=DefaultAccount`; empty: none."""
    return next((line.strip("| ") for line in text.splitlines() if line.strip("| ")), "")


def associations(text: str) -> list[Association]:
    """From `sacctmgr --noheader --parsable2 show association ... format=ASSOCIATION_FIELDS`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    return [
        Association(account, partition, _names(qos), default) for account, partition, qos, default in rows if account
    ]


def qos_limits(text: str) -> dict[str, QosLimit]:
    """From `sacctmgr --noheader --parsable2 show qos format=QOS_FIELDS`: the limits of each QOS, by its name."""
    found = {}
    for name, wall, tres in (line.split("|") for line in text.splitlines() if line.count("|") == 2):
        counts = {kind: _number(count) for kind, count in re.findall(r"([\w/:]+)=(\w+)", tres)}
        found[name] = QosLimit(minutes(wall), counts.get("node"), counts.get("gres/gpu"))
    return found


def minutes(text: str) -> int | None:
    """Whole minutes of one of Slurm's times, `7-00:00:00`, `1:00:00`, `30:00`, `90`; None where there is no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if not match or text in _UNLIMITED:
        return None
    days, *clock = match.groups()
    said = [int(part) for part in clock if part is not None]
    if days is not None:  # days-hours[:minutes[:seconds]]
        hours, mins, *_ = [*said, 0]
        return (int(days) * 24 + hours) * 60 + mins
    if len(said) == 3:
        return said[0] * 60 + said[1]
    return said[0]  # minutes[:seconds]


def has_pyxis(srun_help: str) -> bool:
    """Whether `srun --help` offers pyxis's options. `--container` alone is Slurm's own, and another matter."""
    return "--container-image" in srun_help


def start_of_test(text: str) -> str:
    """When and where a job could start, as `sbatch --test-only` says; empty: it says nothing of that."""
    found = re.search(r"Job \d+ to start at (\S+) (.*)", text)
    if not found:
        return ""
    start = found[1].replace("T", " ")
    if start.isdigit():  # SLURM_TIME_FORMAT=%s
        start = datetime.fromtimestamp(int(start)).strftime("%Y-%m-%d %H:%M:%S")
    return f"{start} {found[2].strip()}"


def _fields(line: str) -> dict[str, str]:
    """The `Name=value` words of a line of scontrol; a value may have spaces."""
    return dict(re.findall(r"(\S+?)=(.*?)(?=\s+[\w/:&-]+=|\s*$)", line))


def _number(text: str) -> int | None:
    found = re.match(r"\d+", text)
    return int(found.group()) if found and text not in _UNLIMITED else None


def _names(text: str) -> tuple[str, ...]:
    return () if text in ("ALL", *_UNLIMITED) else tuple(text.split(","))

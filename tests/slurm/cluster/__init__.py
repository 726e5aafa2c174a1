"""A real Slurm on this machine, for tests: a controller, and nodes of eight pretended GPUs, each a machine of its own.

A node has its own processes, mounts, host name and network, with no route out: what works only because all nodes are
one machine fails here as on a cluster. Nothing outside one folder is written, and everything ends with the process that
started it, however that one ends. `container_double.c` stands in for pyxis. Needs root and Debian's packages slurmctld,
slurmd, slurm-client, munge, libslurm-dev, gcc, squashfs-tools and iproute2. Where namespaces or loop devices are not to
be had, as in many a container, there is less of all this, and `Cluster.lacks` says so; the nodes' names then stand in
/etc/hosts while they run.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.machine import (
    bridge,
    free_ports,
    has_own_network,
    make_bridge,
    name_nodes,
    processes,
    run,
    until,
    version,
    what_python_needs,
)

HERE = Path(__file__).parent
GPUS, CPUS, MEMORY_MIB = 8, 192, 2_000_000
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "gcc", "mksquashfs", "ip", "unshare", "setpriv")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE")
_OURS = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SINFO", "SACCT")
_IMAGE_ENVIRONMENT = "LD_LIBRARY_PATH=/image/lib\nNCCL_DEBUG=IMAGE\nPYTHONPATH=/image/python\n"


class Unavailable(Exception):
    """This machine cannot run Slurm; the reason is its text."""


@dataclass
class Cluster:
    """A running Slurm. Its clients need `SLURM_CONF` (`env`), and wait for minutes where nobody answers: use `call`."""

    folder: Path
    """slurm.conf, and the daemons' logs in `log/`."""
    shared_root: Path
    """The folder that all nodes share; in truth they share all folders."""
    nodes: list[str]
    lacks: list[str] = field(default_factory=list)
    """What this machine does not give: sentences."""
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    up_after_s: float = 0.0
    """How long it took to come up."""

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def record(self) -> Path:
        """What the container plugin was asked for: a JSON object a line, by srun and by each node."""
        return self.folder / "containers.jsonl"

    @property
    def image(self) -> Path:
        """A squashfs image with nothing but an /etc/environment of its own."""
        return self.folder / "image.sqsh"

    def env(self, **changes: str) -> dict[str, str]:
        """This process's environment for clients: no Slurm's variables but SLURM_CONF."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        return {**clean, "SLURM_CONF": str(self.conf), **changes}

    def call(self, *words: str | Path, timeout_s: float = 20, **env: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's clients, whatever it says."""
        return subprocess.run(
            list(map(str, words)), capture_output=True, text=True, timeout=timeout_s, env=self.env(**env)
        )

    def moekit(self, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command of moekit's as one would on the login node, whatever it says."""
        return self.call(sys.executable, "-m", "moekit", *words, timeout_s=120, **env)

    def submit(self, run: Path, *options: str, **env: str) -> int:
        """`sbatch job.sbatch` by hand in a run directory; the job's id."""
        done = self.call("sbatch", "--parsable", f"--chdir={run}", *options, run / "job.sbatch", **env)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split(";")[0])

    def job(self, job_id: int) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        text = self.call("scontrol", "show", "job", "--oneliner", str(job_id)).stdout
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def wait(self, job_id: int, *states: str, timeout_s: float = 120) -> str:
        """Wait until a job is in one of the states, else until it has ended; its state."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = self.call("squeue", "-h", "-t", "all", "-j", str(job_id), "-o", "%T").stdout.strip()
            if state in (states or ENDED):
                return state
            assert state not in ENDED, f"job {job_id} is {state}: {self.job(job_id)}"
            time.sleep(0.1)
        raise AssertionError(f"job {job_id} is not {states or ENDED} after {timeout_s} s: {self.job(job_id)}")

    def profile(self, name: str = "virtual", **fields: Any) -> Path:
        """Write a cluster profile for moekit; `container="pyxis"` for jobs in an image."""
        said: dict[str, Any] = {
            "name": name,
            "partition": "gpu",
            "gpus_per_node": GPUS,
            "gpu": "h200",
            "cpus_per_task": 96,
            "fabric": "efa",
            "container": "none",
            "preflight": False,  # tests of other things; the nodes have no GPU
            "shared_root": str(self.shared_root),
            "python": sys.executable,
        }
        if fields.get("container") == "pyxis":
            said |= {"image": str(self.image), "mounts": what_python_needs(self.shared_root)}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**said, **fields}))
        return path

    def kill(self, node: str) -> None:
        """End a node and all its processes, as a power cut does; Slurm notices after 10 to 30 s."""
        self.daemons[node].kill()
        self.daemons.pop(node).wait()

    def start(self, node: str) -> None:
        """Start a node; `ready` waits until it takes jobs."""
        if "namespaces" in " ".join(self.lacks):
            self.daemons[node] = _daemon(self, node, ["slurmd", "-D", "-N", node])
            return
        apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        network = (self.folder / "network").exists()
        command = [*apart, *(["--net"] if network else []), "bash", str(HERE / "node.sh"), node, str(self.folder)]
        process = self.daemons[node] = _daemon(self, node, command)
        if network:
            until(lambda: has_own_network(process.pid), f"{node} has no network")
            here = f"{bridge()}{node}"
            run("ip", "link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
            run("ip", "link", "set", here, "master", bridge(), "up")

    def kill_slurmd(self, node: str) -> None:
        """End a node's slurmd alone: what it started goes on. Slurm notices after 10 to 30 s."""
        (self.folder / f"no_slurmd.{node}").touch()
        for process in processes(("slurmd", "-D", "-N", node), SLURM_CONF=str(self.conf)):
            os.kill(process, signal.SIGKILL)

    def start_slurmd(self, node: str) -> None:
        """Start it again."""
        (self.folder / f"no_slurmd.{node}").unlink(missing_ok=True)

    def cut(self, node: str) -> None:
        """Take a node off the network: what it runs goes on, and reaches nobody."""
        run("ip", "link", "set", f"{bridge()}{node}", "down")

    def join(self, node: str) -> None:
        """Put it back."""
        run("ip", "link", "set", f"{bridge()}{node}", "up")

    def stop_controller(self) -> None:
        """End slurmctld; what it knows is in its files."""
        self.daemons["slurmctld"].kill()
        self.daemons.pop("slurmctld").wait()

    def start_controller(self) -> None:
        """Start it again, with all that it knew."""
        self.daemons["slurmctld"] = _daemon(self, "slurmctld", ["slurmctld", "-D"])
        until(lambda: self.call("scontrol", "ping").stdout.count("is UP") == 1, "slurmctld does not come back")

    def ready(self) -> None:
        """Wait until all nodes take jobs."""

        def idle() -> bool:
            assert self.daemons["slurmctld"].poll() is None, "slurmctld ended"
            said = self.call("sinfo", "-h", "-N", "-p", "gpu", "-t", "idle", "-o", "%N").stdout
            return set(said.split()) >= set(self.nodes)

        until(idle, "not all nodes are idle")


@contextmanager
def running(shared_root: Path, nodes: int = 4, more_conf: str = "") -> Iterator[Cluster]:
    """Bring a cluster up, in half a second, and take it down; `more_conf` is put behind slurm.conf.

    Raises:
        Unavailable: there is no Slurm, or no root.
    """
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing or os.geteuid():
        raise Unavailable(f"a real Slurm needs {', '.join(missing) or 'root'}")
    # not below pytest's folder: a socket's path has 107 characters at most
    with tempfile.TemporaryDirectory(prefix="moekit-slurm-", dir="/tmp") as folder:
        cluster = Cluster(Path(folder), shared_root, [f"n{number + 1}" for number in range(nodes)])
        began = time.monotonic()
        try:
            _configure(cluster)
            with cluster.conf.open("a") as conf:
                conf.write(more_conf)
            _start(cluster)
            cluster.up_after_s = time.monotonic() - began
            yield cluster
        except Exception:
            for log in sorted(cluster.folder.glob("log/*")):
                print(f"==> {log.name} <==", *log.read_text(errors="replace").splitlines()[-8:], sep="\n")
            raise
        finally:
            _stop(cluster)


def _configure(cluster: Cluster) -> None:
    """Write everything that the daemons read."""
    folder, names = cluster.folder, cluster.nodes
    folder.chmod(0o755)
    for name in ("state", "log", "dev", "munge", *(f"spool/{node}" for node in names)):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o700)
    (folder / "munge/key").write_bytes(os.urandom(1024))
    (folder / "munge/key").chmod(0o400)
    try:
        for gpu in range(GPUS):  # with /dev/null's numbers; a GPU without a file counts as missing
            os.mknod(folder / f"dev/nvidia{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        cluster.lacks.append("no devices can be made here: jobs get no CUDA_VISIBLE_DEVICES")
        for gpu in range(GPUS):
            (folder / f"dev/nvidia{gpu}").touch()
    apart = subprocess.run(["unshare", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True)
    if apart.returncode:
        cluster.lacks.append("no namespaces can be made here: nodes share processes, host name and network")
    network = None if apart.returncode else make_bridge()
    if network:
        (folder / "network").touch()
    elif not apart.returncode:
        cluster.lacks.append("no bridge can be made here: nodes share this machine's network")
    host, address = socket.gethostname().partition(".")[0], f"{network}.254" if network else "127.0.0.1"
    addresses = [f"{network}.{i + 1}" if network else f"127.0.1.{i + 1}" for i in range(len(names))]
    hosts = [f"127.0.0.1 localhost\n{address} {host}\n", *(f"{a} {n}\n" for a, n in zip(addresses, names, strict=True))]
    (folder / "hosts").write_text("".join(hosts))
    if apart.returncode:
        name_nodes(hosts[1:])
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    port, *ports = free_ports(len(names) + 1)
    size = f"CPUs={CPUS} RealMemory={MEMORY_MIB} Gres=gpu:h200:{GPUS} State=UNKNOWN"
    lines = [
        f"NodeName={node} NodeHostname={host if apart.returncode else node} NodeAddr={there} Port={its_port} {size}"
        for node, there, its_port in zip(
            names, addresses if network else ["127.0.0.1"] * len(names), ports, strict=True
        )
    ]
    text = (HERE / "slurm.conf").read_text()
    said = {"host": host, "address": address, "port": port, "folder": folder, "nodes": "\n".join(lines)}
    cluster.conf.write_text(text.partition("\n")[2].format(**said))
    if not version().startswith(
        "22."
    ):  # which does not know the word; later ones want it where no cgroups are to be had
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    gpus = f"{folder}/dev/nvidia[0-{GPUS - 1}]"
    (folder / "gres.conf").write_text(f"AutoDetect=off\nNodeName={','.join(names)} Name=gpu Type=h200 File={gpus}\n")
    _configure_containers(cluster)


def _configure_containers(cluster: Cluster) -> None:
    """Build the plugin that stands in for pyxis, and an image."""
    plugin, root = cluster.folder / "container_double.so", cluster.folder / "image"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    run("gcc", *flags, "-o", str(plugin), str(HERE / "container_double.c"))
    for name in ("etc", "proc", "sys", "dev", "tmp", "run"):
        (root / name).mkdir(parents=True)
    (root / "etc/environment").write_text(_IMAGE_ENVIRONMENT)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    run("mksquashfs", str(root), str(cluster.image), "-noappend", "-quiet", "-no-progress")
    mounts = "mount -t squashfs -o loop,ro $1 /mnt && mount -t tmpfs none /mnt"
    enters = subprocess.run(["unshare", "--mount", "bash", "-c", mounts, "_", str(cluster.image)], capture_output=True)
    if enters.returncode:
        cluster.lacks.append("no image can be mounted here: a job that asks for one runs on the node itself")
    mode = "host" if enters.returncode else "chroot"
    (cluster.folder / "plugstack.conf").write_text(f"required {plugin} mode={mode} record={cluster.record}\n")


def _start(cluster: Cluster) -> None:
    munge = {"key-file": "munge/key", "socket": "munge.sock", "pid-file": "munge/pid", "log-file": "munge/log"}
    options = [f"--{option}={cluster.folder / name}" for option, name in {**munge, "seed-file": "munge/seed"}.items()]
    cluster.daemons["munged"] = _daemon(cluster, "munged", ["munged", "--foreground", "--force", *options])
    until((cluster.folder / "munge.sock").exists, "munged does not start")
    cluster.daemons["slurmctld"] = _daemon(cluster, "slurmctld", ["slurmctld", "-D", "-c"])
    for node in cluster.nodes:
        cluster.start(node)
    cluster.ready()


def _stop(cluster: Cluster) -> None:
    for process in reversed(cluster.daemons.values()):
        process.kill()
        process.wait()
    if (cluster.folder / "network").exists():
        subprocess.run(["ip", "link", "del", bridge()], capture_output=True)
    if any("namespaces" in sentence for sentence in cluster.lacks):
        name_nodes([])


def _daemon(cluster: Cluster, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    """Start a process that is killed when this one ends."""
    with (cluster.folder / "log" / f"{name}.out").open("wb") as log:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=cluster.env(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

"""What must hold in a cluster profile beyond its single fields: each rule yields problems at the profile's own lines.

A field whose value could not be read is null here, so that one slip hides no other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moekit.problems import Problem, shortened
from moekit.recipe import flat, nodes
from moekit.recipe.load import Source
from moekit.recipe.names import variable_problem

if TYPE_CHECKING:
    from moekit.cluster.profile import Cluster

REQUIRED = ("name", "gpus_per_node", "gpu", "fabric", "container", "shared_root")

_WORD = re.compile(r"[A-Za-z0-9._,@+-]+")
_GRES = re.compile(r"gpu(:[A-Za-z0-9._-]+)?")
_MOUNT = re.compile(r"/[^:]*(:/[^:]*(:[a-z+]+)?)?")


def problems_of(cluster: Cluster, source: Source) -> Iterator[Problem]:
    """Everything that is wrong with a profile whose fields were read one by one."""
    yield from flat.missing(source, REQUIRED)
    yield from _words(cluster, source)
    yield from _container(cluster, source)
    yield from _paths(cluster, source)
    yield from _mounts(cluster, source)
    yield from _limits(cluster, source)
    yield from _environment(cluster, source)


def _words(cluster: Cluster, source: Source) -> Iterator[Problem]:
    for name in ("partition", "cpu_partition", "account", "qos"):
        value = getattr(cluster, name)
        if value is not None and not _WORD.fullmatch(value):
            hint = "write the name as Slurm prints it, without spaces"
            yield Problem(source.where(name), f"`{name}` is `{shortened(value)}`, which no #SBATCH line carries", hint)
    if not _GRES.fullmatch(cluster.gres):
        hint = "write `gpu` or, with Slurm's type, `gpu:h100`; the number is `gpus_per_node`"
        yield Problem(source.where("gres"), f"`gres` is `{shortened(cluster.gres)}`", hint)
    if re.search(r"\s", cluster.python):
        what = f"`python` is `{shortened(cluster.python)}`: one program, without arguments"
        yield Problem(source.where("python"), what, "what it needs before it starts belongs in `setup_script`")


def _container(cluster: Cluster, source: Source) -> Iterator[Problem]:
    """What one kind of container needs, and what the other would leave unread."""
    if cluster.container == "pyxis":
        if _is_unset("image", source):
            what = "`image` is missing, which `container: pyxis` starts"
            yield Problem(source.where("image", "container"), what, "`moekit image import` makes one (handbook 2.2)")
        unread = {"setup_script": "the image is all there is: build it in, or write `container: none`"}
    elif cluster.container == "none":
        remedy = "write `container: pyxis`, or take it out"
        unread = dict.fromkeys(("image", "mounts", "nccl_tests_image"), remedy)
    else:
        return
    for name, hint in unread.items():
        if getattr(cluster, name) is not None:
            yield Problem(source.where(name), f"`{name}` does nothing with `container: {cluster.container}`", hint)


def _is_unset(name: str, source: Source) -> bool:
    node = source.find(name)
    return node is None or (isinstance(node, nodes.Scalar) and node.is_null)


def _paths(cluster: Cluster, source: Source) -> Iterator[Problem]:
    for name in ("image", "nccl_tests_image", "shared_root", "megatron_path", "setup_script", "nccl_tests"):
        value = getattr(cluster, name)
        is_image = name in ("image", "nccl_tests_image")
        if value is None or (is_image and not value.startswith(("/", ".")) and not re.search(r"\s", value)):
            continue  # not a path: a registry's name for an image
        if not value.startswith("/"):
            what = f"`{name}` must be an absolute path, not `{shortened(value)}`"
            yield Problem(source.where(name), what, "all nodes must find it")
        elif found := re.search(r"[\s,:]", value):
            what = f"`{name}` has a `{found.group()}`, which no mount carries: `{shortened(value)}`"
            yield Problem(source.where(name), what, "give it a path without spaces, commas and colons")
    for folder in cluster.library_path or ():
        if not folder.startswith("/") or ":" in folder:
            what = f"`library_path` has `{shortened(folder)}`; it lists absolute folders"
            yield Problem(source.where("library_path"), what, "one folder an entry, as the container sees it")


def _mounts(cluster: Cluster, source: Source) -> Iterator[Problem]:
    """What enroot would make of a mount: commas join mounts, colons split fields, spaces split again in its fstab."""
    place = source.where("mounts")
    for mount in cluster.mounts or ():
        if re.search(r"[\s,]", mount):
            what = f"mount `{shortened(mount)}` has a space or a comma, which pyxis splits at"
            yield Problem(place, what, "give the folder a name without them")
        elif not _MOUNT.fullmatch(mount):
            what = f"mount `{shortened(mount)}` must be `/path` or `/path:/inside`, both absolute"
            yield Problem(place, what, "flags may follow the second: `/path:/inside:ro`")
    inside = Counter((mount.split(":") * 2)[1] if ":" in mount else mount for mount in cluster.mounts or ())
    anyway = {cluster.shared_root: "shared_root", cluster.megatron_path: "megatron_path"}
    for target, times in inside.items():
        if times > 1:
            yield Problem(place, f"two mounts lie at `{target}`", "leave one")
        elif target in anyway:
            yield Problem(
                place, f"a mount lies at `{target}`, where `{anyway[target]}` is mounted anyway", "leave it out"
            )


def _limits(cluster: Cluster, source: Source) -> Iterator[Problem]:
    for name, limit in (("time_limit_min", "max_time_min"), ("max_nodes", "nodes")):
        value, most = getattr(cluster, name), getattr(cluster, limit)
        if value is not None and most is not None and value > most:
            what = f"`{name}` is {value}, more than `{limit}`, which is {most}"
            yield Problem(source.where(name), what, source.origin(limit))


def _environment(cluster: Cluster, source: Source) -> Iterator[Problem]:
    node = source.find("environment")
    for variable, (place, value) in node.entries.items() if isinstance(node, nodes.Mapping) else ():
        name, text = f"environment.{variable}", value.text if isinstance(value, nodes.Scalar) else ""
        if reason := variable_problem(variable):
            yield Problem(str(place), f"`{name}` {reason[0]}", reason[1])
        elif cluster.container == "pyxis" and variable.startswith("ENROOT_") and variable != "ENROOT_CONFIG_PATH":
            what = f"`{name}` never reaches enroot: pyxis drops a job's `ENROOT_` variables"
            yield Problem(str(place), what, "only the nodes' enroot.conf sets it: ask who runs the cluster")
        elif cluster.fabric == "efa" and variable == "NCCL_NET_PLUGIN" and text == "spcx":
            what = f"`{name}` is `spcx`, the plugin of another network: NCCL would fall back to sockets on EFA"
            yield Problem(str(place), what, "on EFA it is `ofi` (handbook 2.2)")

"""`moekit image import | build | verify`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moekit.options import JsonOption, ProfileOption
from moekit.problems import error

if TYPE_CHECKING:
    from moekit.cluster.profile import Cluster

app = typer.Typer()
image = typer.Typer(no_args_is_help=True)
app.add_typer(image, name="image", help="Import, build and verify the container images that jobs run in.")

OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="The squashfs file to make.", show_default="in <shared_root>/images/"),
]


@image.command("import")
def import_(
    name: Annotated[
        str, typer.Argument(metavar="NAME|URI", help="`pytorch`, `nccl-tests`, or docker://REGISTRY#IMAGE:TAG.")
    ],
    out: OutOption = None,
    arch: Annotated[
        str | None, typer.Option("--arch", help="As `uname -m` says it.", show_default="the nodes' of the profile")
    ] = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import a registry's image as a squashfs file, by version, with what it is beside it in FILE.json.

    `pytorch` is the handbook's base, `nccl-tests` AWS's image that measures the network: keep it with the baselines,
    which hold for this image alone. Without enroot here, srun does it on a node of the profile's.

    moekit image import nccl-tests --out /shared/images/nccl-tests.sqsh
    """
    from moekit.image import known
    from moekit.image.make import import_image

    wanted, cluster = known.find(name), _cluster(profile)
    arch = arch or known.default_arch(cluster)
    path = out or _folder(cluster) / known.file_name(wanted, arch)
    made = import_image(wanted, path, arch, cluster)
    _say(path, "imported" if made else "is there already", as_json)


@image.command("build")
def build(
    what: Annotated[Literal["efa"], typer.Argument(help="`efa`: AWS's EFA libraries, and NCCL's plugin for them.")],
    base: Annotated[
        Path | None, typer.Option("--base", help="The image to begin with.", show_default="pytorch-26.06.sqsh there")
    ] = None,
    out: OutOption = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build an image with a fabric's libraries: a container of the base, the libraries in it, exported and removed.

    Interrupted, run it again: nothing half ever has the image's name. Versions stand in FILE.json.
    """
    from moekit.image.make import build_efa

    cluster = _cluster(profile)
    begin = base or _folder(cluster, "--base") / "pytorch-26.06.sqsh"
    path = out or (
        Path(cluster.image)
        if cluster and cluster.image and cluster.image.startswith("/")
        else begin.with_name(f"{begin.stem}-{what}.sqsh")
    )
    made = build_efa(begin, path, cluster)
    _say(path, "built" if made else "is there already", as_json)


@image.command("verify")
def verify(
    image: Annotated[
        str | None, typer.Argument(metavar="[IMAGE]", help="The image to verify.", show_default="the profile's")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Over so many nodes.", show_default="2, and 1 with `fabric: none`"),
    ] = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start an image on the profile's nodes: torch and Transformer Engine as expected, all devices, a sum on each.

    Then a sum over two nodes, with the network that NCCL took on each: `Libfabric` where the fabric is EFA.
    """
    from moekit.image import verify as verifying

    cluster = _cluster(profile)
    if cluster is None:
        raise error("no `--profile` says on which nodes", "give `--profile`, or set MOEKIT_PROFILE")
    path = image or cluster.image or ""
    findings = verifying.verify(path, cluster, nodes or (1 if cluster.fabric == "none" else 2))
    wrong = [one for one in findings if one.wanted]
    if as_json:
        print(json.dumps([asdict(one) for one in findings], indent=1))
    else:
        for one in findings:
            print(f"  {one.what:24}  {one.found}" + (f"   should be {one.wanted}" if one.wanted else ""))
        print(f"{path}: {'not ' if wrong else ''}as profile `{cluster.name}` says")
    if wrong:
        raise error(f"{len(wrong)} of {len(findings)} things are not as they should be", verifying.remedies(findings))


def _cluster(profile: str | None) -> Cluster | None:
    from moekit.cluster.profile import find_cluster

    return find_cluster(profile) if profile else None


def _folder(cluster: Cluster | None, option: str = "--out") -> Path:
    if cluster is None:
        raise error("nothing says where images lie", f"give `{option}`, or `--profile`: then <shared_root>/images/")
    return Path(cluster.shared_root) / "images"


def _say(path: Path, word: str, as_json: bool) -> None:
    from moekit.image.record import record_of, sentences

    record = record_of(path) or {}
    if as_json:
        print(json.dumps({"image": str(path), "made": word != "is there already", "record": record}, indent=1))
        return
    print(f"{path}: {word}")
    for line in sentences(record):
        print(f"  {line}")
    print(f"  {'next':10}  moekit image verify {path} --profile FILE", file=sys.stderr)

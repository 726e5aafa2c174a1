"""The images that moekit knows by name, and what makes an address of a registry good enough to be kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moekit import share
from moekit.cluster.profile import Cluster
from moekit.problems import did_you_mean, error, shortened

SCHEME = "docker://"
_TAGGED = re.compile(
    r"docker://(?P<registry>[^\s/#@]+)#(?P<image>[a-z0-9/._-]+)(:(?P<tag>[\w.-]+))?(@sha256:[0-9a-f]{64})?"
)
ARM = "aarch64"


@dataclass(frozen=True)
class Known:
    """An image with a name."""

    uri: str
    """As enroot takes it: `docker://REGISTRY#IMAGE:TAG`."""
    file: str
    """What its squashfs file is called, without its ending."""
    what: str


def versions() -> dict[str, str]:
    """What `images/versions.env` says: addresses, and versions of what is built into images."""
    lines = (share.folder("images") / "versions.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def known() -> dict[str, Known]:
    """The images by name: the handbook's base (2.2), and AWS's nccl-tests, by a versioned tag (2.1)."""
    said = versions()
    return {
        "pytorch": Known(SCHEME + said["PYTORCH"], "pytorch-26.06", "NGC PyTorch 26.06, to train in"),
        "nccl-tests": Known(SCHEME + said["NCCL_TESTS"], "nccl-tests", "AWS's nccl-tests, to measure the network"),
    }


def find(given: str) -> Known:
    """The image of a name, or of an address with a version.

    Raises:
        MoekitError: there is no such name, the address is none that enroot takes, or it has no version.
    """
    images = known()
    if given in images:
        return images[given]
    if not given.startswith(SCHEME):
        hint = did_you_mean(given, images) or f"{' or '.join(images)}, or docker://REGISTRY#IMAGE:TAG"
        raise error(f"there is no image `{shortened(given)}`", hint)
    found = _TAGGED.fullmatch(given)
    if not found:
        raise error(f"`{shortened(given)}` is no address that enroot takes", "write docker://REGISTRY#IMAGE:TAG")
    tag = found["tag"]
    if "@" not in given and (not tag or tag == "latest"):
        moving = "`latest`" if tag else "without a tag it"
        what = f"`{shortened(given)}` names no version: {moving} is another image tomorrow"
        raise error(what, "name a versioned tag, or `@sha256:` with its digest; a baseline is kept for one image")
    name = found["image"].rpartition("/")[2]
    return Known(given, f"{name}-{tag}" if tag else name, given)


def default_arch(cluster: Cluster | None) -> str | None:
    """The architecture of a profile's nodes where it need not be this machine's: GB200 and GB300 have Grace."""
    return ARM if cluster and cluster.gpu.startswith("gb") else None


def file_name(image: Known, arch: str | None) -> str:
    """What its file is called."""
    return f"{image.file}{'-arm64' if arch == ARM else ''}.sqsh"

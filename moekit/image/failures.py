"""What enroot prints when it fails, by the message to the remedy (its src/common.sh and src/docker.sh of 4.0)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from moekit.problems import MoekitError, error

_KNOWN = (
    (
        r"Could not resolve host: (?P<who>\S+)",
        "this node does not know `{who}`: it has no way to the internet",
        "run it on a node that has, or set `https_proxy`",
    ),
    (
        r"URL \S*?//(?P<who>[^/]+)\S* returned error code: 40[13]",
        "`{who}` wants to know who asks",
        "put `machine {who} login USER password KEY` into ~/.config/enroot/.credentials; NGC's user is $oauthtoken",
    ),
    (
        r"URL (?P<who>\S+) returned error code: 404",
        "the registry has no such image: {who}",
        "correct the tag; registries take old ones away",
    ),
    (r"URL (?P<who>\S+) returned error code: 429", "the registry counts too many requests: {who}", "wait, or log in"),
    (
        r"[Nn]o space left on device",
        "no space is left for the image",
        "enroot unpacks below ENROOT_TEMP_PATH (/tmp), ENROOT_CACHE_PATH and ENROOT_DATA_PATH: name folders with room",
    ),
    (
        r"cannot create directory '(?P<who>[^']+)'",
        "enroot cannot make its folder {who}",
        "set ENROOT_RUNTIME_PATH, ENROOT_CACHE_PATH and ENROOT_DATA_PATH to folders that are yours",
    ),
    (
        r"Command not found: (?P<who>.+)",
        "enroot lacks a program here: {who}",
        "run it on a node where enroot is set up",
    ),
    (
        r"the plugin does not find what it needs:\s*(?P<who>.+)",
        "the image's libraries are of other versions than the plugin was built for: {who}",
        "take an EFA installer that fits the base image (`images/versions.env`)",
    ),
    (
        r"(?P<who>the image is cut off)",
        "{who}, and gets no name",
        "see that the disk has room, and run it again: it begins anew",
    ),
    (r"\w+\.sh: (?P<who>.+)", "{who}", "run it again once that is mended: nothing half is in the way"),
)


def explained(what: str, code: int, output: Sequence[str]) -> MoekitError:
    """Why a script of `images/` ended with `code`, from the last lines it printed; `what` is what it did."""
    text = "\n".join(output)
    for pattern, said, hint in _KNOWN:
        if found := re.search(pattern, text):
            who = {key: value.strip() for key, value in found.groupdict().items()}
            return error(f"{what} failed: {said.format(**who)}", hint.format(**who))
    ending = f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"
    last = next((line.strip() for line in reversed(output) if line.strip()), "")
    return error(f"{what} failed: {last or ending}", "run it again: it begins where nothing half is in the way")

"""What stands in for a site in tests of images: where scripts run, and what a base image downloads."""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

INSTALLER = """#!/bin/bash
set -eu
echo "$@" >/opt/efa-options
mkdir -p /opt/amazon/efa/bin /opt/amazon/efa/lib
printf '#!/bin/sh\\necho "fi_info: 2.4.0"\\necho "libfabric: 2.4.0amzn1.0"\\n' >/opt/amazon/efa/bin/fi_info
chmod +x /opt/amazon/efa/bin/fi_info
lib=/opt/amazon/efa/lib/libfabric.so.1
echo 'int fabric(void) { return 1; }' | gcc -shared -fPIC -Wl,-soname,libfabric.so.1 -x c - -o "$lib"
cat # what stands on standard input is not its own
"""
CONFIGURE = """#!/bin/bash
echo "$@" >/opt/ofi-options
"""
MAKEFILE = """all:
\techo 'int fabric(void); int plugin(void) { return fabric(); }' >plugin.c
\tgcc -shared -fPIC plugin.c -o plugin.so -L/opt/amazon/efa/lib -l:libfabric.so.1
install:
\tmkdir -p /opt/amazon/ofi-nccl/lib
\tcp plugin.so /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so
"""
CURL = """#!/bin/bash
set -eu
while (($#)); do case $1 in -o) out=$2; shift 2 ;; --retry) shift 2 ;; -*) shift ;; *) url=$1; shift ;; esac; done
echo "$url" >>/srv/asked
[[ -f /srv/${url##*/} ]] || { echo "curl: (22) The requested URL returned error: 404" >&2; exit 22; }
cp "/srv/${url##*/}" "$out"
"""


@dataclass
class Machine:
    """Where the scripts of `images/` run."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def containers(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "data").iterdir())

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.folder, env={**self.env, **more}, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )

    def script(self, name: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", str(ROOT / "images" / name), *words, **more)

    def moekit(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "moekit", *words, **more)


def archive(path: Path, folder: str, files: Mapping[str, str]) -> None:
    """A tar file of some programs in a folder."""
    made = path.parent / "made" / folder
    made.mkdir(parents=True)
    for name, text in files.items():
        (made / name).write_text(text)
        (made / name).chmod(0o755)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(made, folder)
    shutil.rmtree(path.parent / "made")

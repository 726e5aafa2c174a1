#!/bin/bash
# Import a registry's image as a squashfs file, with what it is in OUT.json beside it.
#
#   bash import.sh URI OUT [ARCH]    URI like docker://nvcr.io#nvidia/pytorch:26.06-py3; ARCH like aarch64
#
# Where it is cut off, run it again: nothing half has the name OUT, and enroot keeps the layers that it has.
set -euo pipefail
# shellcheck source=images/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

(($# >= 2)) || fail "usage: bash import.sh URI OUT [ARCH]"
uri=$1
claim "$2"
arch=${3:-$(uname -m)}
command -v enroot >/dev/null || fail "there is no enroot on $(hostname)"
enroot import -o "$PART" -a "$arch" "$uri"
publish "\"from\": $(json "$uri")" "\"arch\": $(json "$arch")"

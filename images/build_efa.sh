#!/bin/bash
# A base image with AWS's EFA: a writable container of BASE, install_efa.sh in it, exported as OUT, and removed. What it
# is made of stands in OUT.json.
#
#   bash build_efa.sh BASE OUT    both .sqsh files; on a compute node, which has enroot and, for enroot's hooks, a GPU
#
# Where it is cut off, run it again: it begins anew, and nothing half has the name OUT.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=images/lib.sh
source "$here/lib.sh"
# shellcheck source=images/versions.env
source "$here/versions.env"

(($# == 2)) || fail "usage: bash build_efa.sh BASE OUT"
base=$1
command -v enroot >/dev/null || fail "there is no enroot on $(hostname)"
is_whole "$base" || fail "the base is no whole squashfs image: $base"
claim "$2"

remove_container() {
    if enroot list | grep -qxF -e "$container"; then
        enroot remove -f "$container"
    fi
}

container=moekit-efa-$(printf %s "$OUT" | sha256sum | cut -c 1-12)
remove_container # of a build that was killed
trap remove_container EXIT
enroot create -n "$container" "$base"
enroot start --root --rw "$container" bash -s -- "$EFA_INSTALLER" "$AWS_OFI_NCCL" <"$here/install_efa.sh"
# an image's entrypoint may greet before it
installed=$(enroot start "$container" cat /opt/amazon/moekit-efa.json | sed -n '/^{$/,/^}$/p')
[[ -n $installed ]] || fail "the container says nothing of what was installed"
enroot export -o "$PART" "$container"

if [[ -f $base.json ]]; then
    made_from=$(<"$base.json")
else
    made_from="{\"image\": $(json "$(basename "$base")")}"
fi
publish "\"base\": ${made_from//$'\n'/$'\n' }" "\"efa\": ${installed//$'\n'/$'\n' }"

#!/bin/bash
# What a node has, for `moekit init`: one fact a line, its words apart by tabs. It changes nothing.
#
#   bash ask_node.sh PATH...    the paths are files to look for
say() {
    local IFS=$'\t'
    printf '%s\n' "$*"
}

behind() { # the name of what a link leads to; empty where there is none
    local to
    to=$(readlink "$1") && printf '%s' "${to##*/}"
}

say host "$(hostname)"
say arch "$(uname -m)"

# /proc/net is of the node's own network, also where /sys is of another
while IFS=: read -r name rest; do
    name=${name//[[:space:]]/}
    if [[ -n $rest && $name != *"|"* ]]; then
        say net "$name" "$(behind "/sys/class/net/$name/device/driver")"
    fi
done </proc/net/dev
while read -r name to _; do
    if [[ $to == 00000000 ]]; then
        say route "$name"
    fi
done </proc/net/route

for port in /sys/class/infiniband/*/ports/*; do
    if [[ -e $port ]]; then
        device=${port%/ports/*}
        say rdma "${device##*/}" "$(behind "$device/device/driver")" "$(<"$port/link_layer")" "$(<"$port/state")"
    fi
done

if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name --format=csv,noheader | while read -r name; do
        say gpu "$name"
    done
fi

while read -r _ folder kind _; do
    case $kind in
        lustre | nfs | nfs4 | gpfs | beegfs | wekafs | ceph | fuse.ceph | fuse.juicefs | glusterfs | fuse.glusterfs | \
            orangefs | pvfs2 | panfs | daos | fuse.daos)
            say mount "$folder" "$kind"
            ;;
    esac
done </proc/mounts

for name in "$@"; do
    if [[ -e $name ]]; then
        say file "$name"
    fi
done
exit 0

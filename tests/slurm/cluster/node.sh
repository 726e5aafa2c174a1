#!/bin/bash
# What makes a process a node of the test cluster, in namespaces of its own: node.sh NAME FOLDER. This shell is the
# node's first process: it reaps orphans, and killing it ends everything that the node ever started.
set -euo pipefail
hostname "$1"
# names come from the cluster's list alone: a node has no name server, and no route to one
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf
if [[ -e $2/network ]]; then
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
    ip link set lo up
    ip link set eth0 up
    ip addr add "$(sed -n "s/ $1\$//p" "$2/hosts")/24" dev eth0
fi
slurmd -D -N "$1" &
wait $! || true
# a slurmd that was killed leaves what it started alone; a new one finds it
while [[ -e $2/no_slurmd.$1 ]]; do
    until [[ ! -e $2/no_slurmd.$1 ]]; do sleep 0.1; done
    slurmd -D -N "$1" &
    wait $! || true
done

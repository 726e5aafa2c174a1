#!/bin/bash
# What a moekit job does before it trains, in a folder that has preflight.json, environment.sh and job/.
#
#   bash preflight.sh OUT                  on the first node of an allocation: looks at every node, measures, judges
#   bash preflight.sh collective PROGRAM ARGUMENT...
#                                          one rank of nccl-tests, inside its container; srun runs this
#
# The first ends with 0 where the nodes are fit for training and with 3 where they are not; all of it is in
# OUT/verdict.json. What is judged, and how, is in job/preflight/.
set -euo pipefail

fail() {
    echo "preflight.sh: $*" >&2
    exit 1
}

look_at_all() {
    local nodes python
    nodes=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}") || nodes=""
    [[ -n $nodes ]] || fail "\`scontrol show hostnames\` names no node for SLURM_JOB_NODELIST=${SLURM_JOB_NODELIST:-}"
    mapfile -t nodes <<<"$nodes"
    python=$(command -v python3) || fail "there is no python3 on $(hostname), outside the container"
    PYTHONPATH=job PYTHONNOUSERSITE=1 exec "$python" -m preflight "$1" "${nodes[@]}"
}

if [[ ${1:-} != collective ]]; then
    [[ -n ${1:-} ]] || fail "say where to write: bash preflight.sh OUT"
    look_at_all "$1"
fi
# From here on one rank: the environment may have variables of any name but those beginning with MOEKIT_.
MOEKIT_COMMAND=("${@:2}")
# shellcheck source=/dev/null
source ./environment.sh
if [[ -n ${MOEKIT_SETUP_SCRIPT:-} ]]; then
    # The site's own, written for an interactive shell: it gets none of these options and arguments.
    set +eu --
    # shellcheck source=/dev/null
    source "$MOEKIT_SETUP_SCRIPT"
    set -eu
    # shellcheck source=/dev/null
    source ./environment.sh
fi
if [[ -n ${MOEKIT_PREFLIGHT_LIBRARY_PATH:-} ]]; then
    export LD_LIBRARY_PATH=$MOEKIT_PREFLIGHT_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
# The lines that name the network; they cost nothing while data move.
export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV
for MOEKIT_NAME in "${!MOEKIT_TRY_@}"; do
    export "${MOEKIT_NAME#MOEKIT_TRY_}=${!MOEKIT_NAME}"
done
exec "${MOEKIT_COMMAND[@]}"

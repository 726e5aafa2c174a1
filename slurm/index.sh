#!/bin/bash
# The body of the job that builds Megatron's index of a run's data, on one CPU node and before the run's own job.
#
#   bash index.sh            on that node; index.sbatch runs this
#   bash index.sh build      inside the container; srun runs this
#
# The working directory is `index/` of the run directory. Read: argv.srun and argv.python, one word a line; above it,
# argv.first and environment.sh.
set -euo pipefail

if [[ ${1:-} != build ]]; then
    mapfile -t MOEKIT_SRUN <argv.srun
    if [[ " ${MOEKIT_SRUN[*]}" == *" --container-image="* ]]; then
        MOEKIT_SRUN+=("--container-workdir=$PWD")
    fi
    unset -v PYTHONPATH PYTHONHOME
    exec srun "${MOEKIT_SRUN[@]}" bash index.sh build
fi
mapfile -t MOEKIT_COMMAND <argv.python
mapfile -t MOEKIT_ARGV <../argv.first
# shellcheck source=/dev/null
source ../environment.sh
if [[ -n ${MOEKIT_SETUP_SCRIPT:-} ]]; then
    set +eu # it is the site's, written for an interactive shell
    # shellcheck source=/dev/null
    source "$MOEKIT_SETUP_SCRIPT"
    set -eu
fi
if [[ -n ${MOEKIT_LIBRARY_PATH:-} ]]; then
    export LD_LIBRARY_PATH=$MOEKIT_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
export PYTHONPATH=${PWD%/*}/job PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1
exec "${MOEKIT_COMMAND[@]}" ../job/index.py "${MOEKIT_ARGV[@]}"

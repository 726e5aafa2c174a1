#!/bin/bash
# The body of a moekit job: one attempt of the run whose directory is the working directory.
#
#   bash train.sh                            on the first node of the job; job.sbatch runs this
#   bash train.sh node ENDPOINT ID ARGV      on every node, inside the container; srun runs this
#
# Read from the run directory: argv.srun, argv.torchrun, argv.first or argv.resume (one word a line), environment.sh.
# Written there: attempts/N/train.log, N being one more than the last attempt's number.
set -euo pipefail

fail() {
    echo "train.sh: $*" >&2
    exit 1
}

# Make the folder of the next attempt; its number is MOEKIT_ATTEMPT.
new_attempt() {
    local folder last
    MOEKIT_ATTEMPT=1
    mkdir -p attempts
    for folder in attempts/*/; do
        last=$(basename "$folder")
        if [[ $last =~ ^[1-9][0-9]*$ ]] && ((last >= MOEKIT_ATTEMPT)); then
            MOEKIT_ATTEMPT=$((last + 1))
        fi
    done
    until mkdir "attempts/$MOEKIT_ATTEMPT" 2>/dev/null; do
        [[ -d attempts/$MOEKIT_ATTEMPT ]] || fail "cannot make the folder $PWD/attempts/$MOEKIT_ATTEMPT"
        MOEKIT_ATTEMPT=$((MOEKIT_ATTEMPT + 1))
    done
    export MOEKIT_ATTEMPT
}

# Take a virtual environment of the submitting shell out of this one: the container's Python, or the profile's, is meant.
leave_virtual_environment() {
    if [[ -n ${VIRTUAL_ENV:-} ]]; then
        PATH=:$PATH:
        PATH=${PATH//":$VIRTUAL_ENV/bin:"/:}
        PATH=${PATH#:}
        PATH=${PATH%:}
    fi
    unset -v VIRTUAL_ENV PYTHONPATH PYTHONHOME
}

# The command that runs one task on each node, as MOEKIT_COMMAND.
on_the_first_node() {
    local nodes head argv=argv.first srun
    [[ -n ${SLURM_JOB_ID:-} ]] || fail "this is no Slurm job: run \`sbatch job.sbatch\` in $PWD"
    # Here, outside the container, which has no scontrol. Never a fallback: each node would wait for a world of its own.
    nodes=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}") || nodes=""
    head=${nodes%%$'\n'*}
    [[ -n $head ]] || fail "\`scontrol show hostnames\` names no node for SLURM_JOB_NODELIST=${SLURM_JOB_NODELIST:-}"
    # Megatron writes this file once a checkpoint is complete.
    if [[ -e checkpoints/latest_checkpointed_iteration.txt ]]; then
        argv=argv.resume
    fi
    mapfile -t srun <argv.srun
    if [[ " ${srun[*]}" == *" --container-image="* ]]; then
        srun+=("--container-workdir=$PWD")
    fi
    leave_virtual_environment
    new_attempt
    echo "attempt $MOEKIT_ATTEMPT with $argv on ${nodes//$'\n'/ }, log in attempts/$MOEKIT_ATTEMPT/train.log"
    MOEKIT_COMMAND=(srun "${srun[@]}" bash train.sh node
        "$head:$((20000 + SLURM_JOB_ID % 10000))" "$SLURM_JOB_ID.$MOEKIT_ATTEMPT" "$argv")
}

# The command that starts a node's training processes, as MOEKIT_COMMAND.
on_every_node() {
    local endpoint=$1 id=$2 torchrun argv
    mapfile -t torchrun <argv.torchrun
    mapfile -t argv <"$3"
    MOEKIT_COMMAND=("${torchrun[@]}" "--rdzv-id=$id" "--rdzv-endpoint=$endpoint" job/entry.py "${argv[@]}")
}

# Each part ends by reading the environment, whose variables may have any name but those beginning with MOEKIT_.
if [[ ${1:-} != node ]]; then
    on_the_first_node
    # shellcheck source=/dev/null
    source ./environment.sh
    exec "${MOEKIT_COMMAND[@]}" >"attempts/$MOEKIT_ATTEMPT/train.log" 2>&1
else
    on_every_node "${@:2}"
    # Once more: an image may set variables of its own when it starts.
    # shellcheck source=/dev/null
    source ./environment.sh
    if [[ -n ${MOEKIT_LIBRARY_PATH:-} ]]; then
        export LD_LIBRARY_PATH=$MOEKIT_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    fi
    export PYTHONPATH=$PWD/job${PYTHONPATH:+:$PYTHONPATH} PYTHONNOUSERSITE=1
    exec "${MOEKIT_COMMAND[@]}"
fi

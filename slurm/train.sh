#!/bin/bash
# The body of a moekit job: one attempt of the run whose directory is the working directory.
#
#   bash train.sh                            on the first node of the job; job.sbatch runs this
#   bash train.sh node ENDPOINT ID ARGV      on every node, inside the container; srun runs this
#
# Read from the run directory: argv.srun, argv.torchrun, argv.first or argv.resume (one word a line), argv.nsys,
# environment.sh, end. Written there: jobs/ID, and attempts/N/train.log, N being one more than the last attempt's number.
set -euo pipefail

fail() {
    echo "train.sh: $*" >&2
    exit 1
}

# Say at once which job this is: whoever submitted it may not have lived to write it down.
write_job_id() {
    [[ -n ${SLURM_JOB_ID:-} ]] || fail "this is no Slurm job: run \`sbatch job.sbatch\` in $PWD"
    mkdir -p jobs && : >"jobs/$SLURM_JOB_ID"
}

# Whether the last complete checkpoint is of the step where training ends: a chain's further jobs have nothing to do.
is_finished() {
    local end step
    [[ -e end && -e $LATEST ]] || return 1
    mapfile -t end <end # the last step of all, and the multiple of steps at which Megatron stops or 0
    step=$(<"$LATEST")
    [[ $step =~ ^[0-9]+$ ]] || return 1
    ((step >= end[0] || (end[1] > 0 && step > 0 && step % end[1] == 0)))
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

# A port that nothing on this node uses, as MOEKIT_PORT. The search begins where no other job's does, and stays below
# the ports that Linux hands out by itself, so none is taken before torchrun listens.
find_port() {
    local port local_address used=" "
    while read -r _ local_address _; do
        used+="${local_address##*:} "
    done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
    for ((port = SLURM_JOB_ID % 10000; ; port++)); do
        MOEKIT_PORT=$((20000 + port % 10000))
        [[ $used != *" $(printf %04X "$MOEKIT_PORT") "* ]] || continue
        return
    done
}

# The command that runs one task on each node, as MOEKIT_COMMAND.
on_the_first_node() {
    local nodes head argv=argv.first srun
    # Here, outside the container, which has no scontrol. Never a fallback: each node would wait for a world of its own.
    nodes=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}") || nodes=""
    head=${nodes%%$'\n'*}
    [[ -n $head ]] || fail "\`scontrol show hostnames\` names no node for SLURM_JOB_NODELIST=${SLURM_JOB_NODELIST:-}"
    if [[ -e $LATEST ]]; then
        argv=argv.resume
    fi
    mapfile -t srun <argv.srun
    if [[ " ${srun[*]}" == *" --container-image="* ]]; then
        srun+=("--container-workdir=$PWD")
    fi
    leave_virtual_environment
    find_port
    new_attempt
    echo "attempt $MOEKIT_ATTEMPT with $argv on $SLURM_JOB_NODELIST, log in attempts/$MOEKIT_ATTEMPT/train.log"
    MOEKIT_COMMAND=(srun "${srun[@]}" bash train.sh node
        "$head:$MOEKIT_PORT" "$SLURM_JOB_ID.$MOEKIT_ATTEMPT" "$argv")
}

# Hand a signal that came to this shell on to the tasks on all nodes, once. Slurm does it: srun itself would take a
# SIGTERM for the order to kill them.
hand_on() {
    MOEKIT_WAITS=again
    [[ $MOEKIT_TOLD != *" $1 "* ]] || return 0
    MOEKIT_TOLD+=" $1 "
    echo "SIG$1 is handed on to all nodes"
    scancel --signal="$1" "$SLURM_JOB_ID" || true
}

# Run MOEKIT_COMMAND to its end, whatever signals come; its exit code is MOEKIT_CODE.
run_step() {
    local signal step
    MOEKIT_TOLD=""
    for signal in TERM INT HUP USR1 USR2; do
        # shellcheck disable=SC2064 # the signal's name of now
        trap "hand_on $signal" "$signal"
    done
    # In a shell of its own: the environment may have variables of any name but those beginning with MOEKIT_.
    (
        # shellcheck source=/dev/null
        source ./environment.sh
        exec "${MOEKIT_COMMAND[@]}" >"attempts/$MOEKIT_ATTEMPT/train.log" 2>&1
    ) &
    step=$!
    MOEKIT_WAITS=again
    while [[ -n $MOEKIT_WAITS ]]; do
        MOEKIT_WAITS=""
        MOEKIT_CODE=0
        wait "$step" || MOEKIT_CODE=$?
    done
}

# Whether every rank says that it came to its end by itself. torchrun ends with 1 also where its ranks were told to save
# and end, and did.
all_ranks_ended_well() {
    local word torchrun ranks=0 well
    mapfile -t torchrun <argv.torchrun
    for word in "${torchrun[@]}"; do
        [[ $word != --nproc-per-node=* ]] || ranks=$((${word#*=} * SLURM_JOB_NUM_NODES))
    done
    well=$(cat "attempts/$MOEKIT_ATTEMPT"/exit/rank*.json 2>/dev/null | grep -c '"code": 0[,}]') || true
    ((ranks > 0 && well == ranks))
}

# The command that starts a node's training processes, as MOEKIT_COMMAND.
on_every_node() {
    local endpoint=$1 id=$2 torchrun argv nsys
    mapfile -t torchrun <argv.torchrun
    mapfile -t argv <"$3"
    # In Slurm's order of the nodes, which keeps neighbours together: rank r is on node r / processes of a node.
    MOEKIT_COMMAND=("${torchrun[@]}" "--rdzv-id=$id" "--rdzv-endpoint=$endpoint" "--node-rank=$SLURM_NODEID"
        job/entry.py "${argv[@]}")
    if [[ ,${MOEKIT_PROFILED_NODES:-}, == *",$SLURM_NODEID,"* ]]; then
        command -v nsys >/dev/null || fail "there is no \`nsys\` on $(hostname): \`profile.use_pytorch_profiler: true\` needs none"
        mapfile -t nsys <argv.nsys
        mkdir -p "attempts/$MOEKIT_ATTEMPT/nsys"
        MOEKIT_COMMAND=("${nsys[@]}" "--output=attempts/$MOEKIT_ATTEMPT/nsys/node$SLURM_NODEID" "${MOEKIT_COMMAND[@]}")
    fi
}

if [[ ${1:-} != node ]]; then
    write_job_id
    LATEST=checkpoints/latest_checkpointed_iteration.txt # Megatron writes it once a checkpoint is complete
    if is_finished; then
        echo "$(basename "$PWD") is finished at step $(<"$LATEST"): nothing to do"
        exit
    fi
    on_the_first_node
    run_step
    all_ranks_ended_well || exit "$MOEKIT_CODE"
else
    MOEKIT_ARGUMENTS=("${@:2}")
    if [[ -n ${MOEKIT_SETUP_SCRIPT:-} ]]; then
        # The site's own, written for an interactive shell: it gets none of these options and arguments.
        set +eu --
        # shellcheck source=/dev/null
        source "$MOEKIT_SETUP_SCRIPT"
        set -eu
    fi
    on_every_node "${MOEKIT_ARGUMENTS[@]}"
    # Once more: an image may set variables of its own when it starts.
    # shellcheck source=/dev/null
    source ./environment.sh
    if [[ -n ${MOEKIT_LIBRARY_PATH:-} ]]; then
        export LD_LIBRARY_PATH=$MOEKIT_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    fi
    export PYTHONPATH=$PWD/job${PYTHONPATH:+:$PYTHONPATH} PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1
    exec "${MOEKIT_COMMAND[@]}"
fi

#!/bin/bash
# The body of a moekit job: one attempt of the run whose directory is the working directory.
#
#   bash train.sh                            on the first node of the job; job.sbatch runs this
#   bash train.sh node ENDPOINT ID ARGV FIRST
#                                            on every node, inside the container; srun runs this
#
# Read from the run directory: argv.srun, argv.torchrun, argv.first or argv.resume (one word a line), argv.nsys,
# environment.sh. Written there: jobs/ID, and attempts/N/train.log. Whether there is a next attempt, and which number it
# has, job/retry.py decides, by what the earlier ones left. Where there is a preflight.sh, nodes are looked at first.
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

# Ask retry.py, outside the container, what comes next: MOEKIT_NEXT is its answer, a word a line.
ask() {
    local torchrun python answer
    mapfile -t torchrun <argv.torchrun
    # The node's own; else, without a container, the one that trains.
    python=$(command -v python3 || command -v "${torchrun[0]}") ||
        fail "there is no python3 on $(hostname), outside the container"
    answer=$("$python" job/retry.py "$@") || exit
    mapfile -t MOEKIT_NEXT <<<"$answer"
}

# Put this job back into the queue, to start on other nodes than those named, if any are. Slurm ends this shell for it.
requeue() {
    local state stays=1
    trap '' TERM INT HUP USR1 USR2
    # A job that is being cancelled would come back; one that is preempted comes back by itself.
    state=$(squeue --noheader --job="$SLURM_JOB_ID" --format=%T) || state=unknown
    if [[ $state != RUNNING ]]; then
        echo "job $SLURM_JOB_ID is $state: Slurm decides what becomes of it"
        exit "${MOEKIT_CODE:-1}"
    fi
    # Nodes that were refused have cost nothing: that job begins anew though a node's failure would end it.
    ! grep -q '^#SBATCH --no-requeue' job.sbatch || stays=0
    ((stays)) || scontrol update "JobId=$SLURM_JOB_ID" Requeue=1 || true
    scontrol requeue "$SLURM_JOB_ID" || fail "the job cannot go back into the queue: moekit resume $(basename "$PWD") goes on"
    ((stays)) || scontrol update "JobId=$SLURM_JOB_ID" Requeue=0 || true
    if [[ -n $1 ]]; then
        scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$1" || true # else its next start moves on
    fi
    echo "job $SLURM_JOB_ID is back in the queue${1:+, to start without $1}"
    exit 0
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
    local nodes srun first
    # Here, outside the container, which has no scontrol. Never a fallback: each node would wait for a world of its own.
    nodes=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}") || nodes=""
    [[ -n $nodes ]] || fail "\`scontrol show hostnames\` names no node for SLURM_JOB_NODELIST=${SLURM_JOB_NODELIST:-}"
    mapfile -t MOEKIT_NODES <<<"$nodes"
    leave_virtual_environment
    ask start "${MOEKIT_NODES[@]}"
    case ${MOEKIT_NEXT[0]} in
        exit) exit "${MOEKIT_NEXT[1]}" ;;
        requeue) requeue "${MOEKIT_NEXT[1]:-}" ;;
    esac
    export MOEKIT_ATTEMPT=${MOEKIT_NEXT[1]}
    first=${MOEKIT_NEXT[3]}
    MOEKIT_NODES=("${MOEKIT_NODES[@]:first}" "${MOEKIT_NODES[@]:0:first}")
    mapfile -t srun <argv.srun
    if [[ " ${srun[*]}" == *" --container-image="* ]]; then
        srun+=("--container-workdir=$PWD")
    fi
    find_port
    echo "attempt $MOEKIT_ATTEMPT on $SLURM_JOB_NODELIST, log in attempts/$MOEKIT_ATTEMPT/train.log"
    MOEKIT_COMMAND=(srun "${srun[@]}" bash train.sh node
        "${MOEKIT_NODES[0]}:$MOEKIT_PORT" "$SLURM_JOB_ID.$MOEKIT_ATTEMPT" "${MOEKIT_NEXT[2]}" "$first")
}

# Whether the nodes are fit for training: preflight.sh says so, where it is asked for.
are_fit() {
    local code=0
    [[ -e preflight.sh && ${MOEKIT_PREFLIGHT:-} != off ]] || return 0
    bash preflight.sh "attempts/$MOEKIT_ATTEMPT/preflight" || code=$?
    ((code == 0 || code == 3)) || echo "preflight.sh ended with $code, which says nothing of the nodes" >&2
    ((code != 3))
}

# End the step, whose process is named, if NCCL took sockets where the nodes have a faster network.
watch_network() {
    [[ -e preflight.json && ${MOEKIT_PREFLIGHT:-} != off ]] && command -v python3 >/dev/null || return 0
    PYTHONPATH=job exec python3 -m preflight.watching "$1" "attempts/$MOEKIT_ATTEMPT" "${MOEKIT_NODES[@]}"
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
    local signal step watcher
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
    watch_network "$step" &
    watcher=$!
    MOEKIT_WAITS=again
    while [[ -n $MOEKIT_WAITS ]]; do
        MOEKIT_WAITS=""
        MOEKIT_CODE=0
        wait "$step" || MOEKIT_CODE=$?
    done
    kill "$watcher" 2>/dev/null || true
}

# The command that starts a node's training processes, as MOEKIT_COMMAND.
on_every_node() {
    local endpoint=$1 id=$2 first=$4 node torchrun argv nsys
    mapfile -t torchrun <argv.torchrun
    mapfile -t argv <"$3"
    # In Slurm's order of the nodes, which keeps neighbours together, from the one that retry.py names.
    node=$(((SLURM_NODEID - first + SLURM_JOB_NUM_NODES) % SLURM_JOB_NUM_NODES))
    MOEKIT_COMMAND=("${torchrun[@]}" "--rdzv-id=$id" "--rdzv-endpoint=$endpoint" "--node-rank=$node"
        job/entry.py "${argv[@]}")
    if [[ ,${MOEKIT_PROFILED_NODES:-}, == *",$node,"* ]]; then
        command -v nsys >/dev/null || fail "there is no \`nsys\` on $(hostname): \`profile.use_pytorch_profiler: true\` needs none"
        mapfile -t nsys <argv.nsys
        mkdir -p "attempts/$MOEKIT_ATTEMPT/nsys"
        MOEKIT_COMMAND=("${nsys[@]}" "--output=attempts/$MOEKIT_ATTEMPT/nsys/node$node" "${MOEKIT_COMMAND[@]}")
    fi
}

if [[ ${1:-} != node ]]; then
    write_job_id
    on_the_first_node
    MOEKIT_CODE=1
    if are_fit; then
        run_step
    fi
    ask end "$MOEKIT_CODE" "${MOEKIT_NODES[@]}"
    [[ ${MOEKIT_NEXT[0]} != requeue ]] || requeue "${MOEKIT_NEXT[1]:-}"
    exit "${MOEKIT_NEXT[1]}"
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

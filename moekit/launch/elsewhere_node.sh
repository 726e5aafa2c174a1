#!/bin/bash
# The body of a run where there is no Slurm: Hugging Face Jobs, SkyPilot, Kubernetes. On every node, in its container:
#
#   bash node.sh RUN NODE NODES HEAD    RUN: the run directory, which all nodes share; NODE from 0, of so many NODES;
#                                       HEAD: where node 0 is found
#
# Beside it lie the run's files, which node 0 puts into RUN. Read there: argv.torchrun, argv.first or argv.resume (one
# word a line), environment.sh. Written there: attempts/N/train.log. Whether there is a next attempt, and which number
# it has, job/retry.py decides on node 0, and agree.py tells the others.
set -euo pipefail

fail() {
    echo "node.sh: $*" >&2
    exit 1
}

# The run's files, in the run directory; what is there of another recipe stays.
put_files() {
    mkdir -p "$run"
    if [[ -f $run/recipe.yaml ]] && ! cmp -s recipe.yaml "$run/recipe.yaml"; then
        fail "$run is a run of another recipe: give this one another name with --name"
    fi
    [[ $run -ef $PWD ]] || cp -rL --no-preserve=mode ./* "$run"
}

# What comes next, a word a line: job/retry.py's answer on node 0, and on the others what node 0 says.
next_words() {
    if ((node == 0)); then
        local answer
        put_files
        answer=$(cd "$run" && "${torchrun[0]}" job/retry.py start "$(hostname)") || exit
        ((nodes == 1)) || "${torchrun[0]}" agree.py tell "$AGREE_PORT" "$((nodes - 1))" "$answer" || exit
        printf '%s\n' "$answer"
    else
        "${torchrun[0]}" agree.py ask "$head" "$AGREE_PORT"
    fi
}

# Run MOEKIT_COMMAND to its end, whatever signals come, and hand them on; its exit code is MOEKIT_CODE.
run_command() {
    local log=attempts/$MOEKIT_ATTEMPT/train.log training signal
    ((node == 0)) || log=attempts/$MOEKIT_ATTEMPT/node$node.log
    # In a shell of its own: the environment may have variables of any name but those beginning with MOEKIT_.
    (
        # shellcheck source=/dev/null
        source ./environment.sh
        if [[ -n ${MOEKIT_LIBRARY_PATH:-} ]]; then
            export LD_LIBRARY_PATH=$MOEKIT_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        fi
        export PYTHONPATH=$PWD/job${PYTHONPATH:+:$PYTHONPATH} PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1
        exec "${MOEKIT_COMMAND[@]}"
    ) > >(exec tee -a "$log") 2>&1 &
    training=$!
    for signal in TERM INT HUP; do
        # shellcheck disable=SC2064 # the signal's name of now
        trap "MOEKIT_WAITS=again; kill -$signal $training 2>/dev/null || true" "$signal"
    done
    MOEKIT_WAITS=again
    while [[ -n $MOEKIT_WAITS ]]; do
        MOEKIT_WAITS=""
        MOEKIT_CODE=0
        wait "$training" || MOEKIT_CODE=$?
    done
}

(($# == 4)) || fail "usage: bash node.sh RUN NODE NODES HEAD"
run=$1 node=$2 nodes=$3 head=$4
PORT=29511 AGREE_PORT=29512
cd "$(dirname "${BASH_SOURCE[0]}")"
mapfile -t torchrun <argv.torchrun
answer=$(next_words)
mapfile -t MOEKIT_NEXT <<<"$answer"
case ${MOEKIT_NEXT[0]} in
    exit) exit "${MOEKIT_NEXT[1]}" ;;
    go) ;;
    *) fail "job/retry.py says ${MOEKIT_NEXT[*]}" ;;
esac
cd "$run"
export MOEKIT_ATTEMPT=${MOEKIT_NEXT[1]}
mapfile -t argv <"${MOEKIT_NEXT[2]}"
MOEKIT_COMMAND=("${torchrun[@]}" "--rdzv-id=$MOEKIT_ATTEMPT" "--rdzv-endpoint=$head:$PORT" "--node-rank=$node"
    job/entry.py "${argv[@]}")
run_command
if ((node == 0)); then
    answer=$("${torchrun[0]}" job/retry.py end "$MOEKIT_CODE" "$(hostname)")
    mapfile -t MOEKIT_NEXT <<<"$answer"
    exit "${MOEKIT_NEXT[1]}"
fi
exit "$MOEKIT_CODE"

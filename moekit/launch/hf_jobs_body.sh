#!/bin/bash
# A run as one Hugging Face Job: brought to the machine's own disk, trained there, and kept in a bucket all the while. A
# bucket that is mounted is no file system for training: logs are appended to, and checkpoints written in many parts.
#
#   bash hf_job.sh NAME ROOT BUCKET    NAME: the run's; ROOT: a folder on the machine's disk; BUCKET: where it is mounted
#
# Beside it lie the run's files, `bring.list` (what the run reads, a path below ROOT and BUCKET a line) and
# `megatron.list` (the checkout: its address and what to check out, a line each; empty where the image has Megatron).
set -euo pipefail
KEEP_EVERY_S=60

say() { echo "hf_job.sh: $*" >&2; }

# Bring what lies in the bucket to the disk, each path once.
bring() {
    local path
    for path in "$@"; do
        if [[ ! -e $bucket/$path ]]; then
            say "the bucket has no $path"
            exit 1
        fi
        say "bringing $path"
        mkdir -p "$root/$(dirname "$path")"
        cp -r --no-preserve=mode "$bucket/$path" "$root/$(dirname "$path")/"
        [[ $path != data/* ]] || point_at_shards "$path"
    done
}

# A data set lists its shards by where they lay when it was made: now they lie here.
point_at_shards() {
    local list
    for list in "$root/$1"/data-args.*; do
        [[ ! -f $list ]] || sed -i "s|[^ \"]*/${1//./\\.}/|$root/$1/|g" "$list"
    done
}

# Bring the run's own past: its attempts, and its last checkpoint that was kept whole.
bring_past() {
    local step folder
    [[ -d $kept/attempts ]] || return 0
    if ! cmp -s "$here/recipe.yaml" "$kept/recipe.yaml"; then
        say "$kept is a run of another recipe: give this one another name with --name"
        exit 1
    fi
    mkdir -p "$run/checkpoints"
    cp -r --no-preserve=mode "$kept/attempts" "$run/"
    if [[ -f $kept/checkpoints/$TRACKER ]]; then
        step=$(<"$kept/checkpoints/$TRACKER")
        printf -v folder 'iter_%07d' "$step"
        say "bringing the checkpoint of step $step"
        oldest=$folder
        cp -r --no-preserve=mode "$kept/checkpoints/$folder" "$run/checkpoints/"
        cp "$kept/checkpoints/$TRACKER" "$run/checkpoints/"
    fi
}

# Put into the bucket what is new: attempts as they are, then the last checkpoint, whose name comes last of all.
keep() {
    local step folder
    mkdir -p "$kept/checkpoints" || return
    cp -ru "$run/attempts" "$kept/" || say "not all logs are in the bucket yet"
    cp -u "$run"/*.json "$run"/*.yaml "$run"/argv.* "$run/end" "$kept/" 2>/dev/null || true
    [[ -f $run/checkpoints/$TRACKER ]] || return 0
    step=$(<"$run/checkpoints/$TRACKER")
    printf -v folder 'iter_%07d' "$step"
    if [[ -d $run/checkpoints/tokens_per_expert ]]; then
        cp -ru "$run/checkpoints/tokens_per_expert" "$kept/checkpoints/" || true
    fi
    if [[ -f $kept/checkpoints/$TRACKER && $(<"$kept/checkpoints/$TRACKER") == "$step" ]]; then
        return 0
    fi
    cp -r "$run/checkpoints/$folder" "$kept/checkpoints/" || return
    cp "$run/checkpoints/$TRACKER" "$kept/checkpoints/" || return
    say "the checkpoint of step $step is in the bucket"
    prune
}

# What the run itself no longer has, of what this Job brought or made: `checkpoint.keep_last` holds for the bucket too.
prune() {
    local old
    for old in "$kept"/checkpoints/iter_*; do
        if [[ ! ${old##*/} < $oldest && ! -d $run/checkpoints/${old##*/} ]]; then
            rm -r "$old" || true
        fi
    done
}

keep_going() {
    local pause
    # what is being copied when this is told to end, is copied to its end
    trap 'kill "$pause" 2>/dev/null; exit 0' TERM
    while :; do
        sleep "$KEEP_EVERY_S" &
        pause=$!
        wait "$pause" || true
        keep || say "the bucket did not take the last checkpoint yet"
    done
}

# As long as training takes, whatever signals come: a Job that is cancelled or at its timeout gets SIGTERM.
train() {
    local signal training
    bash "$here/node.sh" "$run" 0 1 127.0.0.1 &
    training=$!
    for signal in TERM INT HUP; do
        # shellcheck disable=SC2064 # the signal's name of now
        trap "MOEKIT_WAITS=again; kill -$signal $training 2>/dev/null || true" "$signal"
    done
    MOEKIT_WAITS=again
    while [[ -n $MOEKIT_WAITS ]]; do
        MOEKIT_WAITS="" code=0
        wait "$training" || code=$?
    done
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$2 bucket=$3
run=$root/runs/$1 kept=$bucket/runs/$1
oldest=iter_0000000
TRACKER=latest_checkpointed_iteration.txt
mapfile -t paths <"$here/bring.list"
mapfile -t megatron <"$here/megatron.list"
if ((${#megatron[@]})); then
    say "fetching Megatron ${megatron[1]}"
    git clone --quiet "${megatron[0]}" "$root/Megatron-LM"
    git -C "$root/Megatron-LM" checkout --quiet "${megatron[1]}"
fi
((${#paths[@]} == 0)) || bring "${paths[@]}"
bring_past
keep_going &
keeper=$!
train
kill "$keeper" 2>/dev/null || true
wait "$keeper" || true
keep || { say "the bucket lacks the last checkpoint"; ((code)) || code=1; }
exit "$code"

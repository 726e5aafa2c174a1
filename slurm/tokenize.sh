#!/bin/bash
# The body of one element of the array that tokenizes a data set: it makes one shard.
#
#   bash tokenize.sh OFFSET      on the element's node; array.sbatch runs this
#
# The element's index and OFFSET make the number of the shard: an index may not be as large as a data set has shards.
# The working directory is the submission's. Read there: argv.python, the command up to that number, one word a line.
# The command becomes this process: Slurm's signals reach it, and its exit code is the element's.
set -euo pipefail

fail() {
    echo "tokenize.sh: $*" >&2
    exit 1
}

[[ $# -eq 1 && -n ${SLURM_ARRAY_TASK_ID:-} ]] || fail "this is no element of an array: run \`sbatch array.sbatch\` in $PWD"
mapfile -t MOEKIT_COMMAND <argv.python
task=$((SLURM_ARRAY_TASK_ID + $1))
echo "shard $task: job ${SLURM_ARRAY_JOB_ID:-}_$SLURM_ARRAY_TASK_ID on $(hostname), start ${SLURM_RESTART_COUNT:-0}"
[[ -x ${MOEKIT_COMMAND[0]} ]] ||
    fail "there is no ${MOEKIT_COMMAND[0]} on $(hostname): submit with a moekit that lies where all nodes see it"
export PYTHONUNBUFFERED=1
exec "${MOEKIT_COMMAND[@]}" "$task"

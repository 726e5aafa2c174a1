#!/usr/bin/env bash
# The quickstart's recipe and one of first_moe's width on one GPU, without the CPU's answers for CUDA; under 5 minutes.
#
#     tests/gpu/quickstart.sh [WHEELS [PREPARED]]
#
# For a machine with one NVIDIA GPU and a python3 (3.12 or 3.13; PYTHON= names another) that has torch; it needs no network
# and no Transformer Engine.
#   WHEELS    a folder of wheels for what that python3 lacks: megatron-core at the least, and what moekit and its extra
#             `local` need (`pip download --no-deps -d WHEELS megatron-core==0.19.2`, and so on)
#   PREPARED  the moekit-local/ of a machine on which `moekit launch quickstart` has been run: its data/ and tokenizers/
#             are taken, so that neither datatrove nor tokenizers is needed; without it the text is tokenized anew
# Prints tokens/s, TFLOP/s and peak memory of both; with OUT=DIR they are kept there, in gpu.json, with both logs.
set -euo pipefail

repository=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
wheels=${1:+$(realpath -- "$1")}
prepared=${2:+$(realpath -- "$2")}
python=${PYTHON:-python3}
out=${OUT:+$(realpath -m -- "$OUT")}
work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
cd -- "$work"

# Training sees what is installed, not PYTHONPATH: an environment of its own, with all that the given one can import.
"$python" -m venv --without-pip env
site=$(env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import os, sys; print(sys.argv[1], *filter(os.path.isdir, sys.path[1:]), sep="\n")' "$repository" >"$site/base.pth"
if [[ -n $wheels ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
fi
python=$work/env/bin/python
"$python" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"; print(torch.__version__, torch.cuda.get_device_name())'
if ! command -v cc >/dev/null; then
    echo "no C compiler, which torch.compile needs: it is left out, which costs speed"
    export TORCHDYNAMO_DISABLE=1
fi
if [[ -n $prepared ]]; then
    mkdir moekit-local && cp -r -- "$prepared/data" "$prepared/tokenizers" moekit-local
fi

failed=0 trained=()
for path in recipes/settings/quickstart_gpu.yaml tests/gpu/wide_gpu.yaml; do
    recipe=$(basename "$path" .yaml)
    echo "== $recipe"
    log=moekit-local/runs/$recipe/attempts/1/train.log
    if "$python" -m moekit launch "$repository/$path" --on local; then
        trained+=("moekit-local/runs/$recipe")
    else
        failed=1
        [[ ! -f $log ]] || tail -n 40 "$log"
    fi
    if [[ -n $out && -f $log ]]; then
        mkdir -p -- "$out"
        cp "$log" "$out/$recipe.log"
    fi
done

echo "== results"
"$python" "$repository/tests/gpu/results.py" "${trained[@]}" | tee gpu.json || failed=1
if [[ -n $out ]]; then
    mkdir -p -- "$out"
    cp gpu.json "$out"
fi
exit "$failed"

#!/usr/bin/env bash
# Everything that needs a GPU, in one go and from source: correctness, then figures as JSON in the folder given.
# `all.sh FOLDER --rehearse` runs the same on a CPU, in Triton's interpreter.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:-experiments/results}" && cd "${1:-experiments/results}" && pwd)
links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
mkdir "$links/espalier"
ln -s "$PWD"/proto/espalier/* "$links/espalier/"
for layer in kernels engine prm search experiments; do ln -s "$PWD/$layer" "$links/espalier/$layer"; done
export PYTHONPATH="$links${PYTHONPATH:+:$PYTHONPATH}"
if [[ "${2:-}" == --rehearse ]]; then export TRITON_INTERPRET=1; else export TRITON_INTERPRET=0; fi

{ nvidia-smi; python -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'; } \
    > "$out/gpu-machine.txt" 2>&1
failed=0
python -m pytest -q -m gpu tests/gpu 2>&1 | tee "$out/gpu-tests.txt" || failed=1
python -m espalier.experiments.bench gpu ${2:-} --json "$out/gpu.json" || failed=1
exit $failed

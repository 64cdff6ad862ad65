#!/usr/bin/env bash
# What needs a GPU, from source, in phases of less than eight minutes each, causes before totals; every phase leaves its
# results as they come, and a table at the end says how each ended and what it decides.
#
#   tests/gpu/all.sh [--out FOLDER] [--rehearse] [PHASE ...]     all phases, where none is named
#   tests/gpu/all.sh --help
#
# --out       folder for figures and logs; experiments/results where none is given.
# --rehearse  the same on a CPU, in Triton's interpreter: tests of a GPU are skipped, figures mean nothing.
#
# A plain image will do, with PyTorch, Triton, pytest and what these bring. The first two phases need nothing else, and
# `transformers` a version of that library that runs decoders (see engine/models/zoo), without which it is skipped. The
# others need what `missing` below finds missing: it is installed into a folder of its own, from the folder WHEELS where
# that is set (for a machine without a network), from the index otherwise. WHEELS is filled beforehand by, for Python 3.12,
#   pip download --no-deps --only-binary :all: --python-version 3.12 -d FOLDER $(tests/gpu/all.sh --needs)
set -uo pipefail
cd "$(dirname "$0")/../.."

declare -A phases=(
    [kernels]="kernels beside the CPU's float32: attention, products of few rows, filters, draws"
    [recorded]="recorded steps beside eager ones, bit by bit; compute-sanitizer where it is installed"
    [profile]="a replayed step, kernel by kernel, beside the floor of each"
    [products]="products of few rows beside torch's; those of 1 to 2,048 rows by cuBLAS, cuBLASLt and in FP8"
    [attention]="attention's tiles compiled in other ways, sharing or not, beside torch's own"
    [plain]="a decode step in plain torch, replayed as a graph, eager and compiled"
    [transformers]="decoders by transformers' code: recorded steps beside launched ones and beside the CPU's"
    [invariant]="decode steps and scoring with --batch-invariant"
    [compiled]="what the compiler makes of every kernel: registers, shared memory, occupancy"
    [bandwidth]="copies, attention and the other kernels, as a share of a copy's bandwidth"
    [steps]="decode steps and scoring, over their floors"
    [rates]="searches a second at real sizes, launching ahead and not, beside transformers"
    [searches]="whole searches of the demo beside the CPU's, waits for the device"
    [faults]="engines in a row, no memory, weights that are no numbers, interrupts"
)
order=(kernels recorded profile products attention plain steps rates transformers invariant faults searches bandwidth
    compiled)
declare -A decides=(
    [kernels]="whether the rest is worth running"
    [recorded]="whether replays may be used"
    [profile]="attention or products first; split-K launches; the host's share"
    [products]="own products for few rows, cuBLASLt, FP8: from which number of rows"
    [attention]="stages, warps and registers of a tile; from which prefix on sharing pays; costs of the plan"
    [plain]="the ratio to what torch alone gives, in the same minute"
    [steps]="distance from the sum of the kernels' floors"
    [rates]="when the verifier scores; launching ahead; memory beside its plan"
    [transformers]="whether that path may be used on a card"
    [invariant]="the price of batch invariance"
    [faults]="regressions"
    [searches]="regressions"
    [bandwidth]="share of a copy's bandwidth of each kernel"
    [compiled]="registers and shared memory by this Triton"
)
seconds=470
# Imported by these phases, and in no usual image of PyTorch.
needed=(annotated_types pydantic pydantic_core typing_inspection pebble)

missing() {  # lines NAME==VERSION, as requirements.txt pins them
    python - "${@}" <<'PYTHON'
import re, sys
from importlib import import_module
from pathlib import Path

def is_there(name):
    try:
        return import_module(name)
    except ImportError:
        return None

pins = {}
for line in Path("requirements.txt").read_text(encoding="utf-8").splitlines():
    if found := re.match(r"([\w.-]+)==([^\s;]+)", line):
        pins[found[1].lower().replace("-", "_")] = found[0]
for name in sys.argv[1:]:
    if name.startswith("+") or not is_there(name):
        print(pins[name.removeprefix("+")])
PYTHON
}

out=experiments/results rehearse= chosen=()
while (($#)); do
    case $1 in
        --help | --list)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
            for phase in "${order[@]}"; do printf '  %-12s %s\n' "$phase" "${phases[$phase]}"; done
            exit ;;
        --needs) missing "${needed[@]/#/+}"; exit ;;
        --out) out=${2:?--out needs a folder}; shift ;;
        --rehearse) rehearse=--rehearse ;;
        *)
            [[ -n ${phases[$1]:-} ]] || { echo "$1 is no phase; they are ${order[*]}" >&2; exit 2; }
            chosen+=("$1") ;;
    esac
    shift
done
((${#chosen[@]})) || chosen=("${order[@]}")
mkdir -p "$out"
out=$(cd "$out" && pwd)

links=$(mktemp -d)
trap 'rm -rf "$links"' EXIT
mkdir "$links/espalier" "$links/site"
ln -s "$PWD"/proto/espalier/* "$links/espalier/"
for layer in kernels engine prm search experiments; do ln -s "$PWD/$layer" "$links/espalier/$layer"; done
export PYTHONPATH="$links:$links/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TRITON_INTERPRET=$([[ $rehearse ]] && echo 1 || echo 0)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}  # what the results are compared with is computed by torch on the CPU

install_missing() {
    local absent=()
    mapfile -t absent < <(missing "${needed[@]}")
    ((${#absent[@]})) || return 0
    echo "installing ${absent[*]}"
    python -m pip install --quiet --no-deps --disable-pip-version-check --target "$links/site" \
        ${WHEELS:+--no-index --find-links "$WHEELS"} "${absent[@]}" && return
    echo "missing: ${absent[*]}; put their wheels into a folder and name it by WHEELS (see --help)" >&2
    return 1
}

tests() {  # without the conftest.py of all tests, which imports what is not needed here
    python -m pytest -v -rs --tb=short -p no:cacheprovider --confcutdir tests/gpu "$@"
}

bench() {
    python -m espalier.experiments.lab bench "$@"
}

run_phase() {
    case $1 in
        kernels)
            nvidia-smi
            python -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
            tests tests/gpu/test_gpu_kernels.py tests/gpu/test_gpu_products.py ;;
        recorded)
            tests tests/gpu/test_gpu_recorded.py || return
            command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer"; return 0; }
            compute-sanitizer --error-exitcode 9 python -m pytest -q -p no:cacheprovider --confcutdir tests/gpu \
                tests/gpu/test_gpu_recorded.py -k fewer_rows ;;
        compiled) TRITON_INTERPRET=0 bench gpu-kernels --json "$out/gpu-kernels.json" ;;
        profile | plain | invariant) bench gpu $rehearse --part "$1" --json "$out/card.json" ;;
        products) bench gpu $rehearse --part products --part libraries --json "$out/card.json" ;;
        attention) bench gpu $rehearse --part attention-variants --json "$out/card.json" ;;
        transformers) tests tests/gpu/test_gpu_transformers.py ;;
        bandwidth) bench gpu $rehearse --part ceilings --part attention --part kernels --json "$out/card.json" ;;
        steps) bench gpu $rehearse --part steps --json "$out/card.json" ;;
        rates) bench gpu $rehearse --part searches --json "$out/card.json" ;;
        searches) tests tests/gpu/test_gpu_searches.py ;;
        faults) tests tests/gpu/test_gpu_faults.py ;;
    esac
}
export -f run_phase tests bench
export out rehearse

failed=() ended=()
for phase in "${chosen[@]}"; do
    echo "== $phase: ${phases[$phase]}"
    if [[ $phase != kernels && $phase != recorded ]] && ! install_missing; then
        failed+=("$phase")
        ended+=("$phase" "not started" 0)
        continue
    fi
    begin=$SECONDS
    timeout --kill-after=10 "$seconds" bash -c "run_phase $phase" 2>&1 | tee "$out/gpu-$phase.txt"
    status=${PIPESTATUS[0]}
    ((status == 0)) || failed+=("$phase ($status)")
    ended+=("$phase" "$( ((status == 0)) && echo ok || echo "failed, $status")" $((SECONDS - begin)))
done
printf '\n%-12s %-12s %7s  %s\n' phase ended seconds decides
for ((i = 0; i < ${#ended[@]}; i += 3)); do
    printf '%-12s %-12s %7s  %s\n' "${ended[@]:i:3}" "${decides[${ended[i]}]}"
done
((${#failed[@]} == 0)) || { echo "failed: ${failed[*]}" >&2; exit 1; }

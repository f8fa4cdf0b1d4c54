#!/bin/bash
# run.sh TP OUT [ARGUMENTS OF THE BENCHMARK…]
# The threshold under tensor parallelism: the correctness tests, two minutes of load that crosses N both ways, then the
# throughput of no speculation, static EAGLE3 and the threshold at 1, 32 and 128. Needs TP GPUs and a patched SGLang;
# PY (default python3) is its interpreter and SGLANG_PATH its PYTHONPATH when it is unpacked and not installed.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 TP OUT [ARGUMENTS OF THE BENCHMARK...]" >&2; exit 2; }
tp=$1 out=$2; shift 2
cd "$(dirname "$0")/../.."
mkdir -p "$out"; out=$(cd "$out" && pwd)
py=${PY:-python3} path=${SGLANG_PATH:-}

SPECGATE_GPU_PYTHON=$py SPECGATE_GPU_PYTHONPATH=$path SPECGATE_GPU_TP=$tp SPECGATE_GPU_LOGS=$out/logs-tests \
    "${PYTEST:-pytest}" -m gpu tests/gpu -q -s -rs 2>&1 | tee "$out/tests-tp$tp.log" && tests=0 || tests=$?

"$py" -m benchmarks.threshold.bench --python "$py" --pythonpath "$path" --tensor-parallel "$tp" \
    --servers none,eagle3,threshold --concurrency 1,32,128 --cross 120 \
    --logs "$out/logs" --out "$out/tp$tp.json" "$@" 2>&1 | tee "$out/bench-tp$tp.log"
exit "$tests"  # the throughput is measured all the same

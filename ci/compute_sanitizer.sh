#!/usr/bin/env bash
# Runs the kernels in small blocks under the tools of NVIDIA's compute-sanitizer, on a machine with its GPU:
#   ci/compute_sanitizer.sh [TOOL]...
# Without a name: memcheck, racecheck, initcheck and synccheck. PYTHON names an interpreter with torch, pytest and an
# installed hisparse (python3); compute-sanitizer comes with CUDA.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../tests"
python=${PYTHON:-python3}
[ $# -gt 0 ] || set -- memcheck racecheck initcheck synccheck
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
for tool in "$@"; do
  echo "== $tool =="
  # Of torch's own kernels nothing is looked at: they take most of the time.
  "$sanitizer" --tool "$tool" --kernel-name kernel_substring=hisparse --error-exitcode 1 --print-limit 100 \
    "$python" -m pytest -c ../pyproject.toml --rootdir .. -q -p no:cacheprovider -p no:xdist -k gpu test_small_blocks.py
done

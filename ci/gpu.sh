#!/usr/bin/env bash
# Builds for the GPU of this machine, runs every test that it can, and times the swap-in, in one call:
#   ci/gpu.sh [--bench-only|--tests-only] [arguments for benchmarks/bench_swap_in.py]
# Needs a Python with torch, pybind11, setuptools, ninja and pytest (PYTHON, python3), and nvcc or ROCm. OUT names the
# folder for results (build/gpu).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}
out=${OUT:-build/gpu}
mode=all
case ${1:-} in --bench-only | --tests-only) mode=$1; shift ;; esac
failed=0
mkdir -p "$out"

targets=$("$python" -c 'import torch; print("cpu;rocm" if torch.version.hip else "cpu;cuda")')
HISPARSE_TARGETS=$targets "$python" -m pip install -q --no-build-isolation --no-deps --target build/gpu-site --upgrade .
export PYTHONPATH=$PWD/build/gpu-site PYTHONUNBUFFERED=1
export COLUMNS=240  # room for the error in each line of the tests' summary
cd "$out" && out=$PWD && cd - > /dev/null

if [ "$mode" != --bench-only ]; then
  # Not from the tree's root: `import hisparse` is to find what was installed. The tests of the build itself and of the
  # tree run elsewhere.
  workers=$("$python" -c 'import xdist' 2> /dev/null && echo "-n 6")
  (cd tests && "$python" -m pytest -c ../pyproject.toml --rootdir .. -q -p no:cacheprovider $workers \
    --ignore-glob "test_build*" --ignore-glob "test_isa*" --ignore-glob "test_wheel*" \
    --ignore test_mutations.py . 2>&1 | tee "$out/tests.log" | tail -40) || failed=1
fi
if [ "$mode" != --tests-only ]; then
  (cd benchmarks && "$python" bench_swap_in.py --out "$out" "$@")
fi
exit $failed

#!/usr/bin/env bash
# Builds the CPU target with sanitizers and runs the tests of the ops on it at one warp size:
#   ci/sanitize.sh 32|64 [arguments for pytest]
# PYTHON names an interpreter with pybind11, setuptools, ninja, NumPy, pytest, pytest-timeout and hypothesis (python3),
# SANITIZERS the sanitizers (address,undefined).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}
warp_size=${1:?a warp size is needed}
shift
sanitizers=${SANITIZERS:-address,undefined}
site=$PWD/build/sanitized
HISPARSE_SANITIZE=$sanitizers "$python" -m pip install -q --no-build-isolation --no-deps --upgrade --target "$site" .
case $sanitizers in *thread*) runtime=libtsan.so ;; *) runtime=libasan.so ;; esac
cxx=${CXX:-g++}
export LD_PRELOAD="$($cxx -print-file-name=$runtime) $($cxx -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$site
cd tests
exec "$python" -m pytest -c ../pyproject.toml --rootdir .. -q -p no:cacheprovider --capture=sys -k "cpu$warp_size" "$@" \
  test_copy_items.py test_swap_in.py test_swap_in_safety.py test_swap_in_sizes.py

#!/usr/bin/env bash
# Builds the CPU target with sanitizers and runs the tests of the ops on it at one warp size:
#   ci/sanitize.sh 32|64 [arguments for pytest]
# PYTHON names an interpreter with pybind11, setuptools, ninja, NumPy, pytest, pytest-timeout and hypothesis (python3),
# SANITIZERS the sanitizers: address,undefined (if unset) or thread, on small blocks alone.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}
warp_size=${1:?a warp size is needed}
shift
sanitizers=${SANITIZERS:-address,undefined}
site=$PWD/build/sanitized-$sanitizers
HISPARSE_SANITIZE=$sanitizers "$python" -m pip install -q --no-build-isolation --no-deps --upgrade --target "$site" .
cxx=${CXX:-g++}
export PYTHONPATH=$site HISPARSE_TEST_EXAMPLES=${HISPARSE_TEST_EXAMPLES:-200}
run=(env "LD_PRELOAD=$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libstdc++.so)"
  ASAN_OPTIONS=detect_leaks=0)
tests=(test_copy_items.py test_swap_in.py test_swap_in_safety.py test_swap_in_sizes.py test_swap_in_dsv4.py
  test_swap_in_blocks.py test_planned_copy.py test_dsv4_transfer.py test_translate.py test_security.py test_fuzz.py)
if [ "$sanitizers" = thread ]; then
  # A thread of a kernel costs much here, and small blocks show what large ones do.
  tests=(test_small_blocks.py)
  # Without a fixed layout of addresses, libtsan may find its own taken.
  run=($(setarch -R true 2> /dev/null && echo setarch -R) env
    "LD_PRELOAD=$($cxx -print-file-name=libtsan.so) $($cxx -print-file-name=libstdc++.so)"
    TSAN_OPTIONS=halt_on_error=1 OPENBLAS_NUM_THREADS=1)
fi
cd tests
exec "${run[@]}" "$python" -m pytest -c ../pyproject.toml --rootdir .. -q -p no:cacheprovider --capture=sys \
  -k "cpu$warp_size or test_security" "$@" "${tests[@]}"

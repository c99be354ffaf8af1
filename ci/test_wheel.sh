#!/usr/bin/env bash
# Installs a wheel into fresh environments and runs it there, away from the tree:
#   ci/test_wheel.sh [--older-torch] WHEEL
# Environments: no torch (NumPy alone) and the torch of ci/matrix.json; with --older-torch also the older one named there,
# which has no DLPack exchange API. PyPI has that one with CUDA only, which is a download of several GB. PYTHON names an
# interpreter of the wheel's version (python3). The environments stay under build/wheel/tested.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}
older=
[ "${1:-}" != --older-torch ] || { older=yes; shift; }
wheel=$(readlink -e "${1:?a wheel is needed}")
matrix() { "$python" -c "import json; print(json.load(open('ci/matrix.json'))$1)"; }
work=$PWD/build/wheel/tested
tests=$work/tests
rm -rf "$tests"
mkdir -p "$tests"
cp tests/*.py tests/*.cpp ci/wheel_smoke.py pyproject.toml "$tests"
mkdir -p "$work/kernels/common"
cp kernels/common/*.h "$work/kernels/common" # the stand-in for a driver reads the parameters' structs

environment() { # NAME PACKAGE...: a fresh one with the wheel in it
  local folder=$work/$1
  shift
  rm -rf "$folder"
  "$python" -m venv "$folder"
  "$folder/bin/pip" install -q pytest pytest-timeout hypothesis "$@"
  "$folder/bin/pip" install -q "$wheel"
}

run() { # NAME [argument for the smoke test]
  printf '\n-- %s: %s --\n' "$(basename "$wheel")" "$1"
  (cd "$tests" && unset PYTHONPATH && "$work/$1/bin/python" wheel_smoke.py "${@:2}")
}

test_ops() { # NAME TEST...
  (cd "$tests" && unset PYTHONPATH && "$work/$1/bin/python" -m pytest -c pyproject.toml --rootdir . -o addopts= -q \
    --no-header -p no:cacheprovider "${@:2}" > "$work/$1.log") || { cat "$work/$1.log"; exit 1; }
  tail -1 "$work/$1.log"
}

environment without-torch
run without-torch
test_ops without-torch test_errors.py test_copy_items.py test_swap_in.py test_gpu_drivers.py

environment torch "torch==$(matrix '["torch"]')"
run torch
test_ops torch test_copy_items.py test_swap_in.py
run torch --without-exchange-api

if [ -n "$older" ]; then
  environment older-torch "torch==$(matrix '["older_torch"]')"
  run older-torch
else
  printf '\nSKIPPED torch %s: a download of several GB, see --older-torch. Above, the way that its tensors are read was\n' \
    "$(matrix '["older_torch"]')"
  echo "taken with torch $(matrix '["torch"]'), whose exchange API was hidden, and with a stand-in for torch."
fi

#!/usr/bin/env bash
# Builds all three targets and runs every check and test, on a machine that has nothing but Debian and Python:
#   ci/test.sh [arguments for pytest]
# Works in .venv/ and .toolchains/ of the tree. PYTHON names the interpreter (python3).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}

step() { printf '\n== %s ==\n' "$*"; }

has_headers='import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
if ! command -v g++ > /dev/null || ! "$python" -c 'import ensurepip' 2> /dev/null || ! "$python" -c "$has_headers"; then
  step "Debian packages"
  as_root=$([ "$(id -u)" = 0 ] || echo sudo)
  $as_root apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $as_root apt-get install -qq -y --no-install-recommends \
    g++ python3 python3-venv python3-dev > /dev/null
fi

step "Python packages"
[ -x .venv/bin/python ] && .venv/bin/python -c 'import pip' 2> /dev/null || "$python" -m venv --clear .venv
torch=$(.venv/bin/python -c 'import json; print(json.load(open("ci/matrix.json"))["torch"])')
# torch before the others: what they ask of it is then there already.
.venv/bin/pip install -q "torch==$torch"
.venv/bin/pip install -q "setuptools>=77" "pybind11>=2.12" "ninja>=1.11"

step "Toolchains"
.venv/bin/python ci/setup_toolchains.py
.venv/bin/python ci/setup_sglang.py

step "Build"
HISPARSE_TARGETS="cpu;cuda;rocm" CXXFLAGS="${CXXFLAGS:-} -Werror" \
  .venv/bin/pip install -v --no-build-isolation -e ".[dev,docs]" | grep -v "already satisfied"

step "Disassemblers"
.venv/bin/python ci/isa_gate.py --setup

step "Formatting and lint"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
find kernels -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.hip' \
  | xargs .venv/bin/clang-format --dry-run -Werror
.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yml

step "Documentation"
if [ -x .venv/bin/mkdocs ]; then # its packages need Python 3.11
  NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet --config-file ci/mkdocs.yml
fi

step "Wheels"
export PYTHON=$PWD/.venv/bin/python
rm -rf dist
bash ci/build_wheel.sh
bash ci/check_wheel.sh dist/*/*.whl
bash ci/test_wheel.sh dist/universal/*.whl

step "Sanitizers"
for warp_size in 32 64; do bash ci/sanitize.sh "$warp_size"; done
SANITIZERS=thread bash ci/sanitize.sh 32

step "Mutations"
.venv/bin/python ci/mutations.py --quick

step "Tests"
.venv/bin/python -m pytest -n auto "$@"

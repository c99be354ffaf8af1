#!/usr/bin/env bash
# Compiles the kernels for one architecture of ci/matrix.json and holds the code against the rules of the ISA gate:
#   ci/build_arch.sh gfx942
# PYTHON names the interpreter (python3).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}
work=$PWD/build/wheel
source ci/environment.sh
arch=${1:?an architecture is needed}
mkdir -p "$work"
builder=$(with_packages "$python")
use_toolchains "$builder"
case $arch in
  gfx*) export HISPARSE_TARGETS="cpu;rocm" PYTORCH_ROCM_ARCH=$arch ;;
  *) export HISPARSE_TARGETS="cpu;cuda" TORCH_CUDA_ARCH_LIST=$arch ;;
esac
rm -rf "$work/$arch"
"$builder" -m pip wheel -v --no-build-isolation --no-deps --wheel-dir "$work/$arch" . > "$work/$arch.log" 2>&1 \
  || { tail -50 "$work/$arch.log"; exit 1; }
"$builder" ci/isa_gate.py --setup "$work/$arch"/*.whl

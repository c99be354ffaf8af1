#!/usr/bin/env bash
# Builds wheels from the source distribution with compilers from PyPI, and names them by what auditwheel finds:
#   ci/build_wheel.sh [--all-pythons] [universal|rocm|cu|cpu]...
# Without a name: all four. They go to dist/NAME, the source distribution to dist. PYTHON names the interpreter
# (python3); --all-pythons takes every one of ci/matrix.json that is on PATH. One that lacks the build's packages gets
# them in a virtual environment under build/wheel; of torch, only hipify.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}
work=$PWD/build/wheel
source ci/environment.sh

pythons=("$python")
if [ "${1:-}" = --all-pythons ]; then
  shift
  pythons=()
  for version in $(matrix '*matrix["python"]'); do
    ! "python$version" -c '' 2> /dev/null || pythons+=("python$version")
  done
fi
variants=("$@")
[ $# -gt 0 ] || read -ra variants <<< "$(matrix '*matrix["wheel"]["variants"]')"

mkdir -p "$work" dist
builder=$(with_packages "${pythons[0]}")
use_toolchains "$builder"
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || date +%s)}
"$builder" -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' > "$work/sdist.log" 2>&1
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' hisparse/_version.py)
rm -rf "$work/unpacked"
mkdir "$work/unpacked"
tar -xzf "dist/hisparse-$version.tar.gz" -C "$work/unpacked" --strip-components 1
# The folder keeps its name and its build/, so that object files that are still right are not made again.
source=$work/source
mkdir -p "$source"
find "$source" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
cp -a "$work/unpacked/." "$source"

export CXXFLAGS="$CXXFLAGS '-ffile-prefix-map=$source=.'" LDFLAGS="-Wl,-s"
for interpreter in "${pythons[@]}"; do
  builder=$(with_packages "$interpreter")
  for variant in "${variants[@]}"; do
    label=$([ "$variant" = universal ] || echo "+$variant")
    # What setuptools left of the variant before would be taken for up to date.
    rm -rf "$source"/build/lib* "$source"/build/bdist* "$source"/*.egg-info "$work/raw"
    sed "s/\"$/$label\"/" "$work/unpacked/hisparse/_version.py" > "$source/hisparse/_version.py"
    log=$work/$variant.log
    HISPARSE_TARGETS=$(matrix "';'.join(matrix['wheel']['variants']['$variant'])") "$builder" -m pip wheel -v \
      --no-build-isolation --no-deps --wheel-dir "$work/raw" "$source" > "$log" 2>&1 || { tail -50 "$log"; exit 1; }
    mkdir -p "dist/$variant"
    PATH=$(dirname "$builder"):$PATH "$builder" -m auditwheel repair --wheel-dir "dist/$variant" "$work/raw"/*.whl \
      > "$work/audit.log" 2>&1 || { cat "$work/audit.log"; exit 1; }
    echo "built $(basename "$(ls -t "dist/$variant"/*.whl | head -1)")"
  done
done
find dist -name "hisparse-$version*" -printf '%-90p %9s bytes\n' | sort

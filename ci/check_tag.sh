#!/usr/bin/env bash
# Refuses a release whose tag is not the version: ci/check_tag.sh v1.2.3
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' hisparse/_version.py)
if [ "${1:-}" != "v$version" ]; then
  echo "error: the tag is '${1:-}', but hisparse/_version.py says $version: expected v$version" >&2
  exit 1
fi

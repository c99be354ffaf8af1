#!/usr/bin/env bash
# Checks wheels without installing them: ci/wheel_checks.py, then the ISA gate on the device code inside.
#   ci/check_wheel.sh WHEEL...
# PYTHON names an interpreter with the packages of the dev extra (python3).
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=${PYTHON:-python3}
"$python" "$here/wheel_checks.py" "$@"
for wheel in "$@"; do
  case $wheel in *+cpu-*) ;; *) "$python" "$here/isa_gate.py" --setup "$wheel" ;; esac
done

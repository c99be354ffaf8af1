#!/usr/bin/env bash
# Builds for the GPUs of this machine, runs the tests that need two of them, and times both links alone and at once:
#   ci/two_gpus.sh [arguments for benchmarks/bench_two_links.py]
# Needs what ci/gpu.sh needs, and two GPUs. OUT names the folder for results (build/two_gpus).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=${PYTHON:-python3}
out=${OUT:-build/two_gpus}
failed=0
mkdir -p "$out"
cd "$out" && out=$PWD && cd - > /dev/null

"$python" -c 'import sys, torch; sys.exit("fewer than two GPUs" if torch.cuda.device_count() < 2 else 0)'
targets=$("$python" -c 'import torch; print("cpu;rocm" if torch.version.hip else "cpu;cuda")')
if [ "$targets" = "cpu;cuda" ]; then
  archs=$("$python" -c 'import torch
devices = range(torch.cuda.device_count())
print(";".join(sorted({"%d.%d" % torch.cuda.get_device_capability(n) for n in devices})))')
  export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-$archs}
fi
HISPARSE_TARGETS=$targets "$python" -m pip install -q --no-build-isolation --no-deps --target build/gpu-site --upgrade .
export PYTHONPATH=$PWD/build/gpu-site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export COLUMNS=240  # room for the error in each line of the tests' summary

# Not from the tree's root: `import hisparse` is to find what was installed.
workers=$("$python" -c 'import xdist' 2> /dev/null && echo "-n 6")
(cd tests && "$python" -m pytest -c ../pyproject.toml --rootdir .. -q -p no:cacheprovider $workers \
  --durations 8 test_two_gpus.py test_field_cases_gpu.py test_kvcacheio_gpu.py \
  -k "test_two_gpus or each_device_in_turn or two_devices" 2>&1 | tee "$out/tests.log" | tail -40) || failed=1
(cd benchmarks && "$python" bench_two_links.py --out "$out" "$@") || failed=1
exit $failed

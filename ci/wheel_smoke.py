"""Looks at an installed hisparse from outside: what an import does, that ops run, and what a call without a GPU says.

Run by ci/test_wheel.sh in the environments that a user may have. With --without-exchange-api, torch's tensors are read
as those of releases before the DLPack exchange API.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

NO_LIBRARY = "/nonexistent/libdriver.so"
RUNTIMES = ("libcuda.so", "libamdhip64.so", "libhsa-runtime64.so")

GPU_CALL_WITHOUT_A_DRIVER = """
import fake_gpu
try:
    fake_gpu.Call(None, mapped=False)()
except RuntimeError as error:
    print(error)
"""


def mapped_runtimes() -> list[str]:
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return sorted(path for path in paths if Path(path).name.startswith(RUNTIMES))


def in_child(function) -> None:
    """Runs it in a forked process; an exception there is one here."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "failed in a forked process"


def copies_items() -> None:
    import numpy as np

    import hisparse

    src, dst = np.arange(96, dtype=np.uint8).reshape(4, 24), np.zeros((4, 24), np.uint8)
    hisparse.copy_items(src, dst, np.array([3, 0]), np.array([1, 2]), 24)
    assert (dst[[1, 2]] == src[[3, 0]]).all() and not dst[[0, 3]].any()


def copies_torch_items(without_exchange_api: bool) -> None:
    import torch

    import hisparse

    has_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) is not None
    tensor = torch.Tensor
    if without_exchange_api:
        assert has_api, "this torch has no exchange API to hide"
        hidden = tensor.__dlpack_c_exchange_api__
        tensor.__dlpack_c_exchange_api__ = None
    src, dst = torch.arange(96, dtype=torch.uint8).reshape(4, 24), torch.zeros(4, 24, dtype=torch.uint8)
    try:
        hisparse.copy_items(src, dst, torch.tensor([3, 0]), torch.tensor([1, 2]), 24)
    finally:
        if without_exchange_api:
            tensor.__dlpack_c_exchange_api__ = hidden
    assert torch.equal(dst[[1, 2]], src[[3, 0]]) and not dst[[0, 3]].any()
    print(f"torch {torch.__version__}, exchange API: {'hidden' if without_exchange_api else has_api}")


def main() -> None:
    import hisparse

    assert "torch" not in sys.modules, "import hisparse imports torch"
    assert mapped_runtimes() == [], "import hisparse loads a GPU runtime"
    installed = Path(hisparse.__file__).resolve()
    assert installed.is_relative_to(Path(sys.prefix).resolve()), f"{installed} is not in {sys.prefix}"
    in_child(copies_items)
    copies_items()
    in_child(copies_items)

    has_gpu = False
    with contextlib.suppress(ImportError):
        import torch

        copies_torch_items("--without-exchange-api" in sys.argv)
        has_gpu = torch.cuda.is_available()

    command = Path(sys.prefix) / "bin" / "hisparse"
    info = json.loads(subprocess.run([command, "info", "--json"], check=True, capture_output=True, text=True).stdout)
    assert info["version"] == hisparse.__version__
    subprocess.run([command, "verify", "--quick"], check=True)

    for kind, target in {"cuda": "cuda", "hip": "rocm"}.items():
        environment = {**os.environ, "FAKE_KIND": kind, f"HISPARSE_{kind.upper()}_LIBRARY": NO_LIBRARY}
        code = GPU_CALL_WITHOUT_A_DRIVER
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        label = {"cuda": "CUDA", "rocm": "ROCm"}[target]
        built = target in hisparse.build_info()["targets"]
        expected = f"no {label} driver: {NO_LIBRARY}" if built else f"hisparse was built without the {label} target"
        assert done.stdout.startswith(expected), done.stdout
        print(f"a call on {label} without a driver: {done.stdout.strip()}")

    if has_gpu:
        from hisparse import _C

        _C.targets()
        runtime = [path for path in mapped_runtimes() if "libhsa" not in path]
        assert len(runtime) == 1, f"not one GPU runtime: {runtime}"
    print("ok")


if __name__ == "__main__":
    main()

"""The jobs of CI as the workflow reads them: lines NAME=JSON, from ci/matrix.json.

GPU_RUNNERS, a JSON list, names the architectures of the GPUs in self-hosted runners; unset or empty: there are none.
"""

import json
import os

from hisparse_build.matrix import CUDA_ARCHS, MATRIX, ROCM_ARCHS


def outputs(gpu_runners: str) -> dict[str, list]:
    gpus = json.loads(gpu_runners or "[]")
    codes = [arch for arch in CUDA_ARCHS if arch.startswith("sm_")]  # PTX is compiled for no GPU
    if unknown := set(gpus) - {*ROCM_ARCHS, *codes}:
        raise SystemExit(f"error: GPU_RUNNERS: unknown architecture {min(unknown)}")
    return {
        "archs": [*ROCM_ARCHS, *codes],
        "warp_sizes": MATRIX["cpu"]["warp_sizes"],
        "pythons": MATRIX["python"],
        "gpus": gpus,
    }


if __name__ == "__main__":
    for name, value in outputs(os.environ.get("GPU_RUNNERS", "")).items():
        print(f"{name}={json.dumps(value)}")

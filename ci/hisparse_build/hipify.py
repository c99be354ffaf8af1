"""Translates the shared kernel sources for ROCm with torch's hipify."""

import contextlib
import io
import shutil
from pathlib import Path

from .matrix import BuildError


def write_if_changed(path: Path, content: bytes) -> None:
    """Leaves the file alone where it has this content already, so that nothing that depends on it is rebuilt."""
    if not path.is_file() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _mirror(source: Path, destination: Path) -> list[Path]:
    """Makes `destination` hold exactly the files of `source`; returns them."""
    files = [destination / path.name for path in sorted(source.iterdir()) if path.is_file()]
    _remove_all_but(files, destination)
    for path in files:
        write_if_changed(path, (source / path.name).read_bytes())
    return files


def _remove_all_but(files: list[Path], folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path not in files:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def hipify(root: Path, build: Path) -> Path:
    """Writes build/hip/kernels: the shared sources in HIP's dialect, beside the sources of kernels/hip as they are.

    hipify names its output after its input: a folder called cuda becomes hip, and the files keep their names. So the
    shared sources are staged in build/cuda. It never sees the tree itself, nor what an earlier run has written.
    """
    from torch.utils.hipify import hipify_python

    build = build.resolve()  # hipify skips, without a word, files that it knows by another path
    staged = _mirror(root / "kernels" / "common", build / "cuda" / "kernels" / "common")
    with contextlib.redirect_stderr(io.StringIO()):
        results = hipify_python.hipify(
            project_directory=str(build),
            output_directory=str(build),
            includes=(),
            extra_files=[str(path) for path in staged],
            hipify_extra_files_only=True,
            hip_clang_launch=True,
            show_progress=False,
        )
    output = build / "hip" / "kernels"
    expected = [output / "common" / path.name for path in staged]
    for source, translated in zip(staged, expected, strict=True):
        result = results[str(source)]
        if result.hipified_path != str(translated) or not translated.is_file():
            raise BuildError(f"hipify did not write {translated}: {result.status}, {result.hipified_path}")
    _remove_all_but(expected, output / "common")
    _mirror(root / "kernels" / "hip", output / "hip")
    return output

"""The steps of the build as a file for ninja, which runs them in parallel and skips what is up to date."""

import io
import os
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import ninja
import pybind11
from ninja.ninja_syntax import Writer

from .hipify import hipify, write_if_changed
from .matrix import CODE_OBJECT_VERSION, BuildError
from .toolchains import Compiler

PACKAGE = Path(__file__).resolve().parent
SANITIZERS = ("address", "undefined", "thread")


@dataclass(frozen=True)
class DeviceTarget:
    compiler: Compiler
    archs: list[str]


@dataclass
class Build:
    """One configuration of the extension. All that it writes is under build/ of the tree."""

    root: Path
    version: str
    cxx: Compiler
    cuda: DeviceTarget | None
    rocm: DeviceTarget | None
    sanitizers: tuple[str, ...] = ()
    _steps: Writer = field(init=False, repr=False)

    @property
    def folder(self) -> Path:
        """Configurations that share no object files have folders of their own."""
        return self.root / "build" / "-".join(("native", sys.implementation.cache_tag, *self.sanitizers))

    @property
    def extension(self) -> Path:
        return self.folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"

    @property
    def images(self) -> dict[str, Path]:
        """The device code of each target that is built: what gets embedded."""
        names = {"cuda": "hisparse.fatbin", "rocm": "hisparse.hipfb"}
        return {target: self.folder / name for target, name in names.items() if getattr(self, target)}

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = io.StringIO()
        self._steps = Writer(text)
        self._steps.variable("builddir", _path(self.folder))
        if self.cuda:
            self._cuda_image(self.cuda)
        if self.rocm:
            self._rocm_image(self.rocm)
        self._extension()
        plan = self.folder / "build.ninja"
        write_if_changed(plan, text.getvalue().encode())

        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        program = Path(ninja.BIN_DIR, "ninja")
        environment = {**os.environ, "NINJA_STATUS": "[%f/%t] "}
        # ninja writes to the file itself: what Python holds back in its buffer has to come first.
        sys.stdout.flush()
        if subprocess.run([program, "-f", plan, "-j", jobs], env=environment).returncode != 0:
            raise BuildError("a step of the build failed; what it printed is above")

    def _cuda_image(self, target: DeviceTarget) -> None:
        codes = [f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}" for arch in target.archs]
        # Drivers before 12.4 cannot unpack what a newer nvcc packs.
        flags = ["-fatbin", "--no-compress", "-std=c++17", "-O3", "--expt-relaxed-constexpr", "--threads", "0", *codes]
        warnings = ["-Xptxas", "-warn-spills", "-Werror", "all-warnings"]
        command = _shell(*target.compiler.command, *flags, *warnings)
        self._rule("cuda", f"{command} -MMD -MF $out.d $in -o $out", depfile="$out.d")
        what = f"cuda {' '.join(target.archs)}"
        source = self.root / "kernels" / "cuda" / "hisparse.cu"
        self._step("cuda", what, self.images["cuda"], [source], [self._identity("nvcc", target.compiler)])

    def _rocm_image(self, target: DeviceTarget) -> None:
        sources = hipify(self.root, self.root / "build")
        output = ["--cuda-device-only", "--no-gpu-bundle-output", f"-mcode-object-version={CODE_OBJECT_VERSION}"]
        flags = ["-x", "hip", "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror", *output]
        self._rule("rocm", _shell(*target.compiler.command, *flags) + " --offload-arch=$arch -c $in -o $out")
        # clang writes no depfile for device code.
        depends = [path for path in sorted(sources.rglob("*")) if path.is_file()]
        depends.append(self._identity("rocm", target.compiler))
        code_objects = {arch: self.folder / f"{arch}.co" for arch in target.archs}
        for arch, code_object in code_objects.items():
            self._step("rocm", f"rocm {arch}", code_object, [sources / "hip" / "hisparse.hip"], depends, arch=arch)

        bundle = _shell("env", f"PYTHONPATH={PACKAGE.parent}", sys.executable, "-m", f"{PACKAGE.name}.code_objects")
        files = _shell(*(f"{arch}={path}" for arch, path in code_objects.items()))
        self._rule("bundle", f"{bundle} $out {files}")
        depends = [PACKAGE / "code_objects.py", PACKAGE.parent / "matrix.json"]
        self._step("bundle", "rocm bundle", self.images["rocm"], list(code_objects.values()), depends)

    def _extension(self) -> None:
        config, embedded = self.folder / "build_config.h", self.folder / "images.S"
        write_if_changed(config, self._config().encode())
        write_if_changed(embedded, _embed(self.images).encode())
        python = Path(sysconfig.get_path("include"))
        if not (python / "Python.h").is_file():
            raise BuildError(
                f"no Python headers: {python / 'Python.h'} is missing (Debian: apt-get install python3-dev)"
            )

        flags = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"]
        if self.sanitizers:
            flags += ["-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
            flags += [f"-fsanitize={','.join(self.sanitizers)}"]
        includes = [f"-isystem{python}", f"-isystem{pybind11.get_include()}", f"-I{self.folder}"]
        user = {name: shlex.split(os.environ.get(name, "")) for name in ("CXXFLAGS", "LDFLAGS")}
        compiler = _shell(*self.cxx.command, *flags, *user["CXXFLAGS"])
        exports = PACKAGE / "exports.map"
        link = ["-shared", f"-Wl,--version-script={exports}", "-Wl,-z,relro,-z,now,-z,noexecstack", "-Wl,--as-needed"]
        self._rule("cxx", f"{compiler} {_shell(*includes)} $more -MMD -MF $out.d -c $in -o $out", depfile="$out.d")
        self._rule("embed", f"{_shell(*self.cxx.command)} -c $in -o $out")
        self._rule("link", f"{compiler} {_shell(*link)} $in -ldl {_shell(*user['LDFLAGS'])} -o $out")

        identity = self._identity("cxx", self.cxx, f"pybind11 {pybind11.__version__}")
        objects = [self.folder / "images.o"]
        self._step("embed", "embed device code", objects[0], [embedded], [*self.images.values(), identity])
        kernels = self.root / "kernels"
        for source in sorted([*kernels.glob("host/*.cpp"), *kernels.glob("cpu/*.cpp")]):
            name = source.relative_to(kernels)
            objects.append((self.folder / name).with_suffix(".o"))
            # The executor itself switches threads: ThreadSanitizer looks at what runs on it.
            by_hand = "thread" in self.sanitizers and name == Path("cpu/executor.cpp")
            more = "-fno-sanitize=thread -DHISPARSE_THREAD_SANITIZER" if by_hand else ""
            self._step("cxx", f"c++ {name}", objects[-1], [source], [identity], more=more)
        self._step("link", f"link {self.extension.name}", self.extension, objects, [exports, identity])

    def _config(self) -> str:
        defines = {"VERSION": self.version}
        for name, target in {"CUDA": self.cuda, "ROCM": self.rocm}.items():
            defines[f"{name}_ARCHS"] = ";".join(target.archs) if target else ""
        return "".join(f'#define HISPARSE_{name} "{value}"\n' for name, value in defines.items())

    def _identity(self, name: str, compiler: Compiler, *more: str) -> Path:
        """A file that changes with the compiler, so that another compiler's output is never taken for this one's."""
        path = self.folder / f"{name}.version"
        write_if_changed(path, "\n".join((compiler.version, *more)).encode())
        return path

    def _rule(self, name: str, command: str, depfile: str | None = None) -> None:
        self._steps.rule(name, command, "$what", depfile=depfile, deps="gcc" if depfile else None)

    def _step(
        self, rule: str, what: str, output: Path, inputs: list[Path], depends: list[Path], **variables: str
    ) -> None:
        paths = [[_path(path) for path in group] for group in (inputs, depends)]
        self._steps.build(_path(output), rule, *paths, variables={"what": what, **variables})


def _path(path: Path) -> str:
    """A path as ninja_syntax takes it; what ninja itself reads as special, it escapes but for the dollar sign."""
    return str(path).replace("$", "$$")


def _shell(*words: str) -> str:
    """Words of a command line, quoted for the shell and for ninja."""
    return shlex.join(words).replace("$", "$$")


def _embed(images: dict[str, Path]) -> str:
    """Assembly that defines hisparse_<target>_image and _image_end: nothing between them for a target not built."""
    lines = ['.section .rodata, "a"']
    for target in ("cuda", "rocm"):
        begin, end = f"hisparse_{target}_image", f"hisparse_{target}_image_end"
        quoted = str(images.get(target, "")).replace("\\", "\\\\").replace('"', '\\"')
        lines += [f".globl {begin}, {end}", f".hidden {begin}, {end}", ".balign 4096", f"{begin}:"]
        lines += [f'.incbin "{quoted}"'] if target in images else []
        lines += [f"{end}:", ".byte 0"]  # keeps the next symbol off this one's end
    return "\n".join([*lines, '.section .note.GNU-stack, ""', ""])

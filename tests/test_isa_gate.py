"""The gate on device code (ci/isa_gate.py): what must fail it, what passes, and that docs/isa.md is current."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hisparse_build import toolchains
from hisparse_build.code_objects import FormatError, write_bundle
from hisparse_build.hipify import hipify
from hisparse_build.matrix import ROCM_ARCHS, BuildError
from isa import amd, amd_limits, amd_rules, cost_model, nvidia, report
from isa.cost_model import FITS, CopyLoop, ItemCopy
from isa.disassemblers import AmdDisassembler, Instruction, MissingDisassembler, find
from isa.images import Images, read_images

import hisparse
from hisparse import _C

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "isa_cases"
WAVE_64, WAVE_32 = (CopyLoop(size, items=4, narrow_steps=2) for size in (64, 32))


@pytest.fixture(scope="module", autouse=True)
def disassemblers():
    try:
        find("llvm_nanobind.libs/libLLVM*")
    except MissingDisassembler as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def compile_hip(tmp_path_factory):
    try:
        compiler = toolchains.find_rocm_compiler(ROOT)
    except BuildError as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("code_objects")

    def compile_case(name, arch, *flags):
        output = folder / f"{name}.{arch}.co"
        device = ["-nogpuinc", "-nogpulib", "--cuda-device-only", "--no-gpu-bundle-output", "-mcode-object-version=5"]
        options = ["-x", "hip", "-std=c++17", "-O3", *device, f"--offload-arch={arch}", *flags]
        command = [*compiler.command, *options, "-c", CASES / f"{name}.hip", "-o", output]
        subprocess.run(command, check=True)
        return output

    return compile_case


@pytest.fixture(scope="module")
def compile_cuda(tmp_path_factory):
    try:
        compiler = toolchains.find_nvcc(ROOT)
    except BuildError as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("fat_binaries")

    def compile_case(name):
        output = folder / f"{name}.fatbin"
        flags = ["-fatbin", "-std=c++17", "-O3", "-gencode=arch=compute_90,code=sm_90"]
        subprocess.run([*compiler.command, *flags, CASES / f"{name}.cu", "-o", output], check=True)
        return output

    return compile_case


@pytest.fixture(scope="module")
def shipped():
    if not hisparse.build_info()["rocm_archs"]:
        pytest.skip("this install was built without the ROCm target")
    return read_images(Path(_C.__file__))


@pytest.fixture(scope="module")
def shipped_kernels(shipped):
    return [kernel for data in shipped.code_objects.values() for kernel in amd.read_kernels(data)]


@pytest.fixture(scope="module")
def shipped_cubins(shipped):
    return nvidia.read_kernels(shipped.fat_binary) if shipped.fat_binary else []


def broken(path):
    """The rules that a code object or fat binary of cases breaks, and what the gate says of each."""
    images = read_images(path)
    kernels = [kernel for data in images.code_objects.values() for kernel in amd.read_kernels(data)]
    found = [one for kernel in kernels for one in amd_rules.violations(kernel)]
    if images.fat_binary:
        found += [one for kernel in nvidia.read_kernels(images.fat_binary) for one in nvidia.violations(kernel)]
    texts = {}
    for one in found:
        texts[one.rule] = texts.get(one.rule, "") + f"{one}\n"
    return texts


# The shipped code.


def test_the_shipped_code_passes(shipped_kernels, shipped_cubins):
    assert [str(one) for kernel in shipped_kernels for one in amd_rules.violations(kernel)] == []
    assert [str(one) for kernel in shipped_cubins for one in nvidia.violations(kernel)] == []


def test_every_arch_and_kernel_is_inspected(shipped, shipped_kernels, shipped_cubins):
    info = hisparse.build_info()
    assert list(shipped.code_objects) == info["rocm_archs"]
    names = {
        arch: sorted(kernel.name for kernel in shipped_kernels if kernel.arch == arch) for arch in info["rocm_archs"]
    }
    assert len(set(map(tuple, names.values()))) == 1
    if info["cuda_archs"]:
        found = {(kernel.arch, kernel.name) for kernel in shipped_cubins}
        cubins = [arch for arch in info["cuda_archs"] if arch.startswith("sm_")]
        assert found == {(arch, name) for arch in cubins for name in names[info["rocm_archs"][0]]}


def test_the_document_is_current(shipped, shipped_kernels, shipped_cubins):
    """python3 ci/isa_gate.py --write FILE makes it so."""
    if list(shipped.code_objects) != list(ROCM_ARCHS):
        pytest.skip("this install was built for a choice of architectures")
    _, generated = report.split(ROOT / "docs" / "isa.md")
    compiler = amd.compiler_of(next(iter(shipped.code_objects.values())))
    if f"Compiled by {compiler}." not in generated:
        pytest.skip(f"docs/isa.md is about another compiler's code than that of {compiler}")
    assert report.amd_section(shipped_kernels, compiler) in generated
    assert report.model_section(shipped_kernels) in generated
    assembler = nvidia.assembler_of(shipped.fat_binary)
    if f"Assembled by {assembler}." in generated:
        assert report.nvidia_section(shipped_cubins, assembler) in generated


# Code that must fail.


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201"])
def test_good_code_passes(compile_hip, arch):
    assert broken(compile_hip("good", arch)) == {}


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100", "gfx1201"])
@pytest.mark.parametrize(
    ("case", "rule", "what"),
    [
        ("plain_load", "wide-loads", "no 16-byte load with"),
        ("one_plain_load", "wide-loads", "stores what is not loaded with"),
        ("scalar_loop", "loads-in-flight", "1 of at least 4"),
        ("conditional_loads", "loads-in-flight", "1 of at least 4"),
        ("narrow_copy", "wide-loads", "no 16-byte load with"),
        ("nontemporal_store", "store-marks", "global_store_"),
        ("spill", "spills", "VGPRs"),
        ("scratch", "scratch", "bytes of private memory"),
        ("flat_access", "flat-access", "flat_"),
        ("call", "calls", "s_swappc_b64"),
        ("many_registers", "block-size", "at most 256 threads"),
        ("static_lds", "static-lds", "16384 bytes"),
    ],
)
def test_bad_code_is_caught_by_name(compile_hip, case, rule, what, arch):
    assert what in broken(compile_hip(case, arch)).get(rule, "")


def test_too_many_registers_for_a_large_block(compile_hip):
    assert "a block of 1024 threads has 128" in broken(compile_hip("many_registers", "gfx942"))["vgprs"]
    assert "a block of 1024 threads has 192" in broken(compile_hip("many_registers", "gfx1100"))["vgprs"]


def test_wrong_wavefront_size(compile_hip):
    assert broken(compile_hip("good", "gfx1100", "-mwavefrontsize64")) == {
        "wavefront-size": "gfx1100 copy: wavefront-size: 64, expected 32\n"
    }


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("good", None),
        ("spill", "spills"),
        ("plain_load", "wide-loads"),
        ("one_in_flight", "loads-in-flight"),
    ],
)
def test_cuda_cases(compile_cuda, case, rule):
    found = broken(compile_cuda(case))
    assert rule in found if rule else found == {}


def test_the_program_names_the_rule_and_fails(compile_hip, tmp_path):
    bundle = tmp_path / "bundle"
    for case, code in {"good": 0, "scalar_loop": 1}.items():
        bundle.write_bytes(write_bundle({"gfx942": compile_hip(case, "gfx942").read_bytes()}))
        command = [sys.executable, ROOT / "ci" / "isa_gate.py", bundle]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == code
        assert ("gfx942 copy: loads-in-flight: 1 of at least 4" in result.stdout) == bool(code)


@pytest.mark.parametrize(
    ("file", "old", "new", "rule"),
    [
        ("hip/primitives.h", "__builtin_nontemporal_load(as_global<const Vector>(address))",
         "*as_global<const Vector>(address)", "wide-loads"),
        ("hip/primitives.h", "*as_global<Vector>(address) = word.value",
         "__builtin_nontemporal_store(word.value, as_global<Vector>(address))", "store-marks"),
        ("common/copy_wave.cuh", "kItems = 4", "kItems = 1", "loads-in-flight"),
    ],
)  # fmt: skip
def test_a_change_of_the_real_copy_is_caught(tmp_path, file, old, new, rule):
    pytest.importorskip("torch")
    try:
        compiler = toolchains.find_rocm_compiler(ROOT)
    except BuildError as missing:
        pytest.skip(str(missing))
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    source = tmp_path / "kernels" / file
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new))
    sources = hipify(tmp_path, tmp_path / "build")
    unit, output = sources / "hip" / "hisparse.hip", tmp_path / "gfx942.co"
    options = [
        "-x",
        "hip",
        "-std=c++17",
        "-O3",
        "--cuda-device-only",
        "--no-gpu-bundle-output",
        "--offload-arch=gfx942",
    ]
    subprocess.run([*compiler.command, *options, "-mcode-object-version=5", "-c", unit, "-o", output], check=True)
    assert rule in broken(output)


# The parts.


def assembled(text, arch="gfx942"):
    """A kernel of instructions of 4 bytes; `name:` is a label, and a branch names one."""
    lines, labels = [], {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            labels[line[:-1]] = len(lines)
        else:
            lines.append(line)
    instructions = []
    for place, line in enumerate(lines):
        name, _, label = line.partition(" ")
        if name.startswith(("s_branch", "s_cbranch")):
            line = f"{name} {labels[label] - place - 1 & 0xFFFF}"
        instructions.append(Instruction(4 * place, 4, line))
    return amd.AmdKernel(arch, "kernel", {}, tuple(instructions))


LOAD = "global_load_dwordx4 v[{0}:{1}], v[20:21], off nt"
STORE = "global_store_dwordx4 v[22:23], v[{0}:{1}], off"


def rounds(*steps):
    return "\n".join(step.format(4 * number, 4 * number + 3) for step in steps for number in range(2))


def test_a_wait_inside_a_batch_splits_it():
    whole = assembled(f"{rounds(LOAD)}\ns_waitcnt vmcnt(0)\n{rounds(STORE)}\ns_endpgm")
    assert [batch.by_width for batch in whole.batches] == [{16: 2}]
    split = assembled(rounds(LOAD + "\ns_waitcnt vmcnt(0)\n" + STORE) + "\ns_endpgm")
    assert [batch.by_width for batch in split.batches] == [{16: 1}, {16: 1}]


def test_a_wait_that_leaves_the_loads_in_flight_does_not_count():
    kernel = assembled(f"{rounds(LOAD)}\ns_waitcnt vmcnt(2)\ns_waitcnt lgkmcnt(0)\ns_waitcnt vmcnt(1)\ns_endpgm")
    assert [batch.wait.text for batch in kernel.batches] == ["s_waitcnt vmcnt(1)"]


def test_waits_of_gfx12():
    for wait, left in {
        "s_wait_loadcnt 0x3": 3,
        "s_wait_loadcnt_dscnt 0x102": 1,
        "s_wait_storecnt 0x0": None,
        "s_wait_idle": 0,
        "s_waitcnt lgkmcnt(0)": None,
        "s_waitcnt vmcnt(0) lgkmcnt(0)": 0,
    }.items():
        assert amd.loads_left_in_flight(Instruction(0, 4, wait)) == left


def test_the_path_that_takes_every_load_is_looked_at():
    """Each load and store in a branch of its own, one of them out of line with a wait of its own."""
    text = """
      s_cbranch_execz over_first
      global_load_dwordx4 v[0:3], v[20:21], off nt
      over_first:
      s_cbranch_execnz second
      joined:
      s_cbranch_execz over_store
      s_waitcnt vmcnt(0)
      global_store_dwordx4 v[22:23], v[0:3], off
      over_store:
      s_endpgm
      second:
      {wait}
      global_load_dwordx4 v[4:7], v[20:21], off nt
      s_branch joined"""
    waiting = assembled(text.format(wait="s_waitcnt vmcnt(0)"))
    assert [batch.by_width for batch in waiting.batches] == [{16: 1}, {16: 1}]
    assert [batch.by_width for batch in assembled(text.format(wait="s_nop 0")).batches] == [{16: 2}]


def test_other_loads_of_a_batch_are_counted_from_its_first_wide_load_on():
    narrow = "global_load_dwordx2 v[8:9], v[20:21], off"
    kernel = assembled(f"{narrow}\n{rounds(LOAD)}\n{narrow}\nglobal_load_ubyte v10, v[20:21], off\ns_waitcnt vmcnt(0)")
    assert kernel.batches[0].by_width == {16: 2, 8: 1, 1: 1}


def test_sources_of_a_store():
    kernel = assembled(f"{rounds(LOAD)}\ns_waitcnt vmcnt(0)\nv_mov_b32_e32 v5, 0\n{rounds(STORE)}\ns_endpgm")
    first, second = kernel.wide_stores
    assert {kernel.instructions[place].text for place in kernel.sources(first)} == {LOAD.format(0, 3)}
    assert {kernel.instructions[place].text for place in kernel.sources(second)} == {"v_mov_b32_e32 v5, 0"}


def test_marks_must_be_all_of_the_arch():
    plain = "global_load_b128 v[0:3], v[4:5], off"
    for arch, text, is_wide in [
        ("gfx1100", f"{plain} slc dlc", True),
        ("gfx1100", f"{plain} slc", False),
        ("gfx1201", f"{plain} th:TH_LOAD_NT", True),
        ("gfx1201", f"{plain} th:TH_LOAD_HT", False),
        ("gfx90a", "global_load_dwordx4 v[0:3], v[4:5], off offset:16 glc slc", True),
        ("gfx90a", "global_load_dwordx4 v[0:3], v[4:5], off offset:16 slc", False),
    ]:
        assert bool(assembled(text, arch).wide_loads) == is_wide, text


def kernel_with(arch, **metadata):
    return amd.AmdKernel(arch, "kernel", {f".{name}": value for name, value in metadata.items()}, ())


def test_waves_that_the_registers_allow():
    for arch, vgprs, sgprs, waves in [
        ("gfx90a", 64, 96, 32),
        ("gfx942", 65, 96, 28),
        ("gfx950", 128, 96, 16),
        ("gfx942", 24, 104, 28),
        ("gfx1100", 96, 106, 32),
        ("gfx1201", 97, 106, 24),
    ]:
        assert amd_limits.waves_per_compute_unit(kernel_with(arch, vgpr_count=vgprs, sgpr_count=sgprs)) == waves


@pytest.mark.parametrize("arch", list(amd_limits.COMPUTE_UNITS))
def test_waves_agree_with_the_compiler(compile_hip, arch, capfd):
    for case in ("good", "many_registers"):
        path = compile_hip(case, arch, "-Rpass-analysis=kernel-resource-usage")
        occupancy = int(re.search(r"Occupancy \[waves/SIMD\]: (\d+)", capfd.readouterr().err)[1])
        (kernel,) = amd.read_kernels(path.read_bytes())
        assert amd_limits.waves_per_compute_unit(kernel) == occupancy * amd_limits.COMPUTE_UNITS[arch].simds


def test_every_arch_of_the_matrix_has_its_limits():
    assert set(amd_limits.COMPUTE_UNITS) == set(ROCM_ARCHS)


def test_code_that_is_no_code_is_reported():
    assert [one.text for one in AmdDisassembler("gfx942").instructions(b"\xff" * 8)] == [".long", ".long"]


def test_images_are_found_in_whatever_is_shipped(compile_hip, compile_cuda, tmp_path):
    code_object, fat_binary = compile_hip("good", "gfx942"), compile_cuda("good")
    bundle = write_bundle({"gfx942": code_object.read_bytes()})
    expected = Images({"gfx942": code_object.read_bytes()}, fat_binary.read_bytes())
    assert read_images(code_object) == Images(expected.code_objects)
    assert read_images(fat_binary) == Images({}, expected.fat_binary)
    padded = bundle + bytes(-len(bundle) % 4096) + expected.fat_binary + b"what follows"
    extension = b"\x7fELF".ljust(4096, b"\0") + padded
    (tmp_path / "_C.so").write_bytes(extension)
    assert read_images(tmp_path / "_C.so") == expected
    with zipfile.ZipFile(tmp_path / "hisparse-0-py3.whl", "w") as wheel:
        wheel.writestr("hisparse/_C.cpython-312-x86_64-linux-gnu.so", extension)
    assert read_images(tmp_path / "hisparse-0-py3.whl") == expected
    (tmp_path / "nothing.so").write_bytes(bytes(8192))
    with pytest.raises(FormatError, match="no device code"):
        read_images(tmp_path / "nothing.so")


# The cost model.


def test_counts_of_the_shipped_copy(shipped_kernels):
    loops = {CopyLoop.of(kernel) for kernel in shipped_kernels if kernel.name == cost_model.KERNEL}
    assert loops and loops <= {WAVE_64, WAVE_32}


def test_steps_of_an_item():
    """16 bytes a lane from WARP_SIZE * 16 bytes on, 8 bytes a lane for the rest, as the contract has it."""
    for loop, size, gate, steps in [
        (WAVE_64, 512, True, (0, 1, 0)),
        (WAVE_64, 512, False, (1, 0, 0)),
        (WAVE_64, 584, True, (0, 2, 0)),
        (WAVE_64, 1024, True, (1, 0, 0)),
        (WAVE_64, 1152, True, (1, 1, 0)),
        (WAVE_64, 1157, True, (1, 1, 1)),
        (WAVE_32, 512, True, (1, 0, 0)),
        (WAVE_32, 656, True, (1, 1, 0)),
        (WAVE_32, 1152, False, (3, 0, 0)),
    ]:
        copy = ItemCopy(loop, size, gate)
        assert (copy.wide_steps, copy.narrow_steps, copy.byte_steps) == steps, (loop, size, gate)
    assert ItemCopy(WAVE_64, 1152, aligned=False).wide_steps == 0


def test_bytes_in_flight_and_round_trips():
    assert ItemCopy(WAVE_64, 512).bytes_in_flight_per_lane == 4 * 8
    assert ItemCopy(WAVE_64, 512).bytes_in_flight_per_wave == 4 * 512
    assert ItemCopy(WAVE_64, 512, gate=False).busy_lanes == 0.5
    assert ItemCopy(WAVE_64, 1152).bytes_in_flight_per_wave == 4 * 1152
    assert ItemCopy(WAVE_64, 1152).round_trips == 0.25
    assert ItemCopy(WAVE_64, 1152, gate=False).round_trips == 0.5
    assert ItemCopy(WAVE_32, 1024).round_trips == 0.5


def test_the_model_reproduces_what_was_published():
    low, high = (fit.published_time(ItemCopy(WAVE_64, 512, gate=False)) - 1 for fit in (FITS[0], FITS[-1]))
    assert (low, high) == pytest.approx((0.14, 0.22))
    for fit in FITS:
        assert fit.published_time(ItemCopy(WAVE_64, 512)) == pytest.approx(1)
        narrow, wide = (fit.published_time(ItemCopy(WAVE_64, 1024, aligned=aligned)) for aligned in (False, True))
        assert 1 - wide / narrow == pytest.approx(0.199)
        assert min(fit.fixed, fit.round_trip, fit.slot) > 0
    gains = [cost_model.gain_at_1024(batch) for batch in (1, 10, 24, 100)]
    assert gains == pytest.approx([0.199, 0.128, 0, 0])


def test_the_model_finds_the_gate_right_for_this_loop():
    for fit in FITS:
        for size in cost_model.ITEM_SIZES:
            for aligned in (True, False):
                on, off = (ItemCopy(WAVE_64, size, gate, aligned) for gate in (True, False))
                assert fit.time(on) <= fit.time(off), size
        assert fit.time(ItemCopy(WAVE_64, 1024)) <= fit.time(ItemCopy(WAVE_64, 1024, aligned=False))

"""Build the native library with CMake; pyproject.toml contains all other packaging settings.

Environment variables:
    NATTEN_JAX_NATIVE: ``0`` skips the native library. Nothing is then compiled, and the pure-Python wheel works on
        every machine. By default the library is built on Linux; ``1`` also tries to build it on other systems.
    NATTEN_JAX_MACHINE: ``aarch64`` cross-compiles for 64-bit ARM Linux, without CUDA, with the compiler in
        CROSS_COMPILERS. The result is for the Python version that runs the build. By default the build targets the
        current machine.
    NATTEN_JAX_CUDA: ``1`` builds the CUDA part, and fails if that is impossible. ``12`` and ``13`` do the same, but use
        only nvcc of that major version of CUDA. ``0`` skips the CUDA part. By default the CUDA part is built if an
        NVIDIA GPU of compute capability 8.0 or higher is visible.
    NATTEN_JAX_BENCH: ``1`` adds the kernels that only benchmarks use to the CUDA part.
    NATTEN_JAX_CUDA_SAMPLE: ``1`` compiles each kernel template for only one element type and one feature, which takes
        half the time. Such a build checks that a CUDA compiler accepts the sources. The library is linked, but programs
        cannot load it.
    NATTEN_JAX_SANITIZE: g++ sanitizers for host code, such as ``address,undefined``.
    NATTEN_JAX_CUDA_ARCHS: CUDA architectures, separated by semicolons. The default is DEFAULT_CUDA_ARCHITECTURES, or
        RELEASE_CUDA_ARCHITECTURES in a release, as far as nvcc supports them.
    NATTEN_JAX_RELEASE: ``1`` builds for distribution to other machines. It only changes the default CUDA architectures.
    NATTEN_JAX_CUTLASS_INCLUDE_DIR: include directory of CUTLASS, which contains ``cutlass/`` and ``cute/``. By default
        the headers come from the Python package nvidia-cutlass.
    CUDA_HOME: directory of a CUDA toolkit. Its ``nvcc`` is preferred to the ``nvcc`` on the path.
    CMAKE_BUILD_PARALLEL_LEVEL: number of parallel compilations.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
LIBRARY = "libnatten_jax.so"
OLDEST_COMPUTE_CAPABILITY = 8.0
DEFAULT_CUDA_ARCHITECTURES = "80;90a"
#: 100 and 120 are Blackwell architectures. Both are compiled, because code for one does not run on the other.
RELEASE_CUDA_ARCHITECTURES = "80;90a;100;120"
#: Python packages that together contain a complete nvcc, for machines without a CUDA toolkit.
PACKAGED_CUDA = 13
CUDA_TOOLKIT_REQUIREMENTS = [
    f"nvidia-{part}==13.0.*" for part in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime")
]
CUTLASS_REQUIREMENT = "nvidia-cutlass==4.2.*"
CUTLASS_VARIABLE = "NATTEN_JAX_CUTLASS_INCLUDE_DIR"
BYTES_PER_COMPILATION = 3 << 30
#: GNU cross compiler for each target machine.
CROSS_COMPILERS = {"aarch64": "aarch64-linux-gnu-g++"}


def path_entries() -> list[str]:
    """Return the absolute directories on PATH.

    Relative directories are skipped, so that no program in the current directory runs by accident.
    """
    return list(filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep)))


def find_program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join(path_entries()))


def ask(program: str | Path, *questions: str) -> str:
    """Run a program and return its standard output."""
    return subprocess.run(
        [program, *questions], capture_output=True, encoding="utf-8", errors="backslashreplace", check=False
    ).stdout


def is_gpu_visible() -> bool:
    """Return True if this machine has a supported NVIDIA GPU, or one whose compute capability is unknown."""
    nvidia_smi = find_program("nvidia-smi")
    if nvidia_smi is not None:
        capabilities = ask(nvidia_smi, "--query-gpu=compute_cap", "--format=csv,noheader")
        known = [float(each) for each in re.findall(r"^(\d+\.\d+)\s*$", capabilities, re.MULTILINE)]
        if known:
            return max(known) >= OLDEST_COMPUTE_CAPABILITY
        if subprocess.run([nvidia_smi, "-L"], capture_output=True, check=False).returncode == 0:
            return True
    return Path("/dev/nvidiactl").exists()


def wants_native() -> bool:
    """Return True if the native library is to be built."""
    choice = os.environ.get("NATTEN_JAX_NATIVE", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"NATTEN_JAX_NATIVE must be 0 or 1, got {choice!r}.")
    is_wanted = choice == "1" or (choice == "" and sys.platform == "linux")
    cuda = os.environ.get("NATTEN_JAX_CUDA", "")
    if not is_wanted and cuda not in ("", "0"):
        raise SystemExit(f"NATTEN_JAX_CUDA={cuda} needs the native library: NATTEN_JAX_NATIVE=1 builds it.")
    return is_wanted


def other_machine() -> str | None:
    """Return the target machine of a cross build; ``None`` for a native build."""
    choice = os.environ.get("NATTEN_JAX_MACHINE", "")
    if choice not in ("", *CROSS_COMPILERS):
        raise SystemExit(f"NATTEN_JAX_MACHINE must be one of {', '.join(CROSS_COMPILERS)}, got {choice!r}.")
    return None if choice in ("", platform.machine()) else choice


def cross_options() -> list[str]:
    """Return CMake options for cross-compilation.

    They name the Python headers of this machine, which are identical to the headers of the target machine.
    """
    machine = other_machine()
    if machine is None:
        return []
    compiler = find_program(CROSS_COMPILERS[machine])
    if compiler is None:
        raise SystemExit(f"NATTEN_JAX_MACHINE={machine} needs {CROSS_COMPILERS[machine]}, which is not on the path.")
    return [
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={machine}",
        f"-DCMAKE_CXX_COMPILER={compiler}",
        "-DPYBIND11_USE_CROSSCOMPILING=ON",
        f"-DPython_INCLUDE_DIR={sysconfig.get_path('include')}",
        f"-DPYTHON_MODULE_EXTENSION={extension_suffix(machine)}",
    ]


def extension_suffix(machine: str) -> str:
    """Return the file suffix of extension modules for this version of Python on another machine."""
    return str(sysconfig.get_config_var("EXT_SUFFIX")).replace(platform.machine(), machine)


def build_for_other_machine() -> None:
    """Make setuptools name modules and wheels for the target machine."""
    machine = other_machine()
    if machine is not None:
        os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
        os.environ["SETUPTOOLS_EXT_SUFFIX"] = extension_suffix(machine)


def wants_cuda() -> bool:
    """Return True if the CUDA part is to be built."""
    choice = os.environ.get("NATTEN_JAX_CUDA", "")
    if choice not in ("", "0", "1", "12", "13"):
        raise SystemExit(f"NATTEN_JAX_CUDA must be 0, 1, 12 or 13, got {choice!r}.")
    if other_machine() is not None and choice not in ("", "0"):
        raise SystemExit(f"NATTEN_JAX_MACHINE builds without CUDA: NATTEN_JAX_CUDA must be 0, got {choice!r}.")
    if not wants_native() or other_machine() is not None:
        return False
    return choice in ("1", "12", "13") or (choice == "" and is_gpu_visible())


def chosen_cuda() -> int | None:
    """Return the requested major version of CUDA; ``None`` if any version is allowed."""
    choice = os.environ.get("NATTEN_JAX_CUDA", "")
    return int(choice) if choice in ("12", "13") else None


def is_release() -> bool:
    """Return True if this build is for distribution to other machines."""
    choice = os.environ.get("NATTEN_JAX_RELEASE", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"NATTEN_JAX_RELEASE must be 0 or 1, got {choice!r}.")
    return choice == "1"


def cuda_of(nvcc: Path) -> int | None:
    """Return the major CUDA version of an nvcc; ``None`` if the version is unknown."""
    release = re.search(r"release (\d+)\.", ask(nvcc, "--version"))
    return int(release[1]) if release else None


def installed_nvccs() -> Iterator[Path]:
    """Yield the nvcc of every installed CUDA toolkit, in order of preference."""
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin" / "nvcc").exists():
        yield Path(home) / "bin" / "nvcc"
    for entry in path_entries():
        nvcc = shutil.which("nvcc", path=entry)
        if nvcc:
            yield Path(nvcc)


def find_installed_nvcc() -> Path | None:
    """Return the nvcc of an installed CUDA toolkit of the requested version."""
    chosen = chosen_cuda()
    return next((nvcc for nvcc in installed_nvccs() if chosen is None or cuda_of(nvcc) == chosen), None)


def find_packaged_nvcc() -> Path | None:
    """Return the nvcc of the Python packages in CUDA_TOOLKIT_REQUIREMENTS, which share one directory.

    The current directory, which Python adds to ``sys.path``, is skipped.
    """
    if chosen_cuda() not in (None, PACKAGED_CUDA):
        return None
    here = Path.cwd().resolve()
    for directory in map(Path, sys.path):
        nvcc = directory / "nvidia" / f"cu{PACKAGED_CUDA}" / "bin" / "nvcc"
        if directory.is_absolute() and directory.resolve() != here and nvcc.exists():
            return nvcc.resolve()
    return None


def setup_requirements() -> list[str]:
    """Return the build requirements that pyproject.toml does not list."""
    if not wants_cuda():
        return []
    cutlass = [] if os.environ.get(CUTLASS_VARIABLE) else [CUTLASS_REQUIREMENT]
    if find_installed_nvcc() is not None:
        return cutlass
    if chosen_cuda() not in (None, PACKAGED_CUDA):
        raise SystemExit(no_nvcc())
    return [*cutlass, *CUDA_TOOLKIT_REQUIREMENTS]


def no_nvcc() -> str:
    """Return the error message for a missing nvcc."""
    chosen = chosen_cuda()
    if chosen not in (None, PACKAGED_CUDA):
        found = ", ".join(f"{nvcc} (CUDA {cuda_of(nvcc)})" for nvcc in installed_nvccs()) or "none"
        return (
            f"NATTEN_JAX_CUDA={chosen} needs nvcc of CUDA {chosen} in CUDA_HOME or on the path; found: {found}. On "
            f"PyPI, nvidia-cuda-nvcc-cu{chosen} does not contain the compiler: install a CUDA {chosen} toolkit."
        )
    return (
        "The CUDA part of natten_jax needs nvcc, which is neither on the path, nor in CUDA_HOME, nor installed as "
        f"Python packages ({' '.join(CUDA_TOOLKIT_REQUIREMENTS)}). Install one of these, or set NATTEN_JAX_CUDA=0 to "
        "build without CUDA kernels."
    )


def cuda_architectures(nvcc: Path) -> str:
    """Return the requested CUDA architectures, or all default architectures that nvcc supports, as a CMake list."""
    chosen = os.environ.get("NATTEN_JAX_CUDA_ARCHS")
    wanted = (chosen or (RELEASE_CUDA_ARCHITECTURES if is_release() else DEFAULT_CUDA_ARCHITECTURES)).split(";")
    wrong = [name for name in wanted if not re.fullmatch(r"\d{2,3}[af]?", name)]
    if wrong:
        raise SystemExit(f"NATTEN_JAX_CUDA_ARCHS must be architectures as in '80;90a', got {chosen!r}.")
    # nvcc lists architectures without suffixes ("a", "f"). It supports the suffixes of each architecture that it lists.
    known = re.findall(r"^sm_(\d+)", ask(nvcc, "--list-gpu-code"), re.MULTILINE)
    missing = [name for name in wanted if name.rstrip("af") not in known]
    if missing:
        lack = f"{nvcc} (CUDA {cuda_of(nvcc)}) cannot compile for the CUDA architectures {', '.join(missing)}"
        if chosen or len(missing) == len(wanted):
            raise SystemExit(f"{lack}; it can compile for {', '.join(known)}.")
        print(f"natten_jax: WARNING: {lack}: this build has no machine code for them.", file=sys.stderr, flush=True)
    return ";".join(name for name in wanted if name not in missing)


def cutlass_include_directory() -> Path:
    chosen = os.environ.get(CUTLASS_VARIABLE)
    if not chosen:
        return package_directory("cutlass_library") / "source" / "include"
    if not (Path(chosen) / "cutlass" / "cutlass.h").is_file():
        raise SystemExit(f"{CUTLASS_VARIABLE} must be a directory that holds cutlass/cutlass.h, got {chosen!r}.")
    return Path(chosen).resolve()


def is_sample() -> bool:
    """Return True if this build only checks that a CUDA compiler accepts the sources."""
    choice = os.environ.get("NATTEN_JAX_CUDA_SAMPLE", "")
    if choice not in ("", "0", "1"):
        raise SystemExit(f"NATTEN_JAX_CUDA_SAMPLE must be 0 or 1, got {choice!r}.")
    return choice == "1"


def cuda_options() -> list[str]:
    """Return the CMake options for the CUDA part."""
    if not wants_cuda():
        return ["-DNATTEN_JAX_CUDA=OFF"]
    nvcc = find_installed_nvcc()
    options: list[str] = []
    if nvcc is None:
        nvcc = find_packaged_nvcc()
        if nvcc is None:
            raise SystemExit(no_nvcc())
        # The Python packages install libraries into lib, which is not on the default search path of their nvcc.
        options = [f"-DCMAKE_CUDA_FLAGS=-L{nvcc.parent.parent / 'lib'}"]
    return [
        "-DNATTEN_JAX_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DNATTEN_JAX_CUDA_ARCHS={cuda_architectures(nvcc)}",
        f"-DNATTEN_JAX_BENCH={'ON' if os.environ.get('NATTEN_JAX_BENCH') == '1' else 'OFF'}",
        f"-DNATTEN_JAX_CUDA_SAMPLE={'ON' if is_sample() else 'OFF'}",
        f"-DNATTEN_JAX_CUTLASS_INCLUDE_DIR={cutlass_include_directory()}",
        *options,
    ]


def launcher_options() -> list[str]:
    """Return CMake options that make ccache the compiler launcher, if it is installed."""
    ccache = find_program("ccache")
    if ccache is None:
        return []
    return [f"-DCMAKE_{language}_COMPILER_LAUNCHER={ccache}" for language in ("CXX", "CUDA")]


def package_directory(name: str) -> Path:
    """Return the directory of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"Building natten_jax needs the Python package {name}.")
    return Path(next(iter(spec.submodule_search_locations)))


def native_sources() -> str:
    """Return the fingerprint of ``csrc``. A clone uses it to check that a library was built from the same sources."""
    fingerprint: str = runpy.run_path(str(ROOT / "natten_jax" / "source_tree.py"))["fingerprint"](ROOT / "csrc")
    return fingerprint


def parallel_compilations() -> int:
    """Return the number of parallel compilations that this machine's memory and cores allow."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        memory = BYTES_PER_COMPILATION
    return max(1, min(os.cpu_count() or 1, memory // BYTES_PER_COMPILATION))


class CMakeBuild(build_ext):
    """Build ``natten_jax._native`` and the library next to it."""

    def build_extension(self, ext: Extension) -> None:
        """Configure, compile and install into the directory of the extension."""
        build_directory = Path(self.build_temp).resolve()
        build_directory.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        cmake = find_program("cmake")
        if cmake is None:
            raise SystemExit("Building natten_jax needs cmake, which is not on the path.")
        sanitizers = os.environ.get("NATTEN_JAX_SANITIZE", "")
        generator = ["-G", "Ninja"] if find_program("ninja") else []
        configure = [
            cmake,
            *generator,
            f"-S{ROOT / 'csrc'}",
            f"-B{build_directory}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_INSTALL_PREFIX={target}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={package_directory('pybind11') / 'share' / 'cmake' / 'pybind11'}",
            f"-DNATTEN_JAX_FFI_INCLUDE_DIR={package_directory('jaxlib') / 'include'}",
            f"-DNATTEN_JAX_SOURCES={native_sources()}",
            f"-DNATTEN_JAX_SANITIZE={sanitizers}",
            *cross_options(),
            *launcher_options(),
            *cuda_options(),
        ]
        # CMake's cache may come from an earlier build environment, and refer to tools that no longer exist.
        (build_directory / "CMakeCache.txt").unlink(missing_ok=True)
        subprocess.run(configure, check=True)
        parallel = [] if "CMAKE_BUILD_PARALLEL_LEVEL" in os.environ else ["--parallel", str(parallel_compilations())]
        subprocess.run([cmake, "--build", str(build_directory), *parallel], check=True)
        # Sanitizer reports can name source lines only if the symbols are kept.
        strip = [] if sanitizers else ["--strip"]
        subprocess.run([cmake, "--install", str(build_directory), *strip], check=True)

    def copy_extensions_to_source(self) -> None:
        """Copy the extension, and the library next to it, into the source tree for editable installs."""
        super().copy_extensions_to_source()
        for built, target in self._library_mapping().items():
            self.copy_file(built, target)

    def get_outputs(self) -> list[str]:
        """Return the paths of the extension and of the library."""
        return [*super().get_outputs(), *self._library_mapping()]

    def get_output_mapping(self) -> dict[str, str]:
        """Return a map from the built files to their locations in editable installs."""
        mapping = super().get_output_mapping()
        return {**mapping, **(self._library_mapping() if mapping else {})}

    def _library_mapping(self) -> dict[str, str]:
        source = Path(self.get_finalized_command("build_py").get_package_dir("natten_jax"))
        return {str(Path(self.build_lib) / "natten_jax" / LIBRARY): str(source / LIBRARY)}


build_for_other_machine()
setup(
    ext_modules=[Extension("natten_jax._native", sources=[])] if wants_native() else [],
    cmdclass={"build_ext": CMakeBuild},
    setup_requires=setup_requirements(),
)

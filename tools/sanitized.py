"""Run Python over a core built with sanitizers: ``sanitized.py address,undefined -m pytest``.

The core is built into ``build/address-undefined``, beside an environment that has all that this one
has, but takes ``prefixkv`` from there: its Python files are links to ``src``. Child processes of a
test run in that environment too. The first fault ends the process with a report.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "prefixkv"

OPTIONS = {
    # CPython keeps much until the process ends: no leak. Frames that outlive their function are not
    # looked for: with g++ 12 they lose the alignment of vectors (GCC bug 110027).
    "ASAN_OPTIONS": "detect_leaks=0:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def build(sanitizers: str, directory: Path) -> Path:
    """The sanitized native module."""
    tools = Path(sys.executable).parent
    cmake = str(tools / "cmake")
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    options = {
        "CMAKE_BUILD_TYPE": "None",
        "Python_EXECUTABLE": sys.executable,
        "PREFIXKV_SANITIZE": sanitizers,
    }
    configure = [cmake, "-S", str(ROOT), "-B", str(directory), "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(configure, check=True, env=environment, stdout=subprocess.DEVNULL)
    subprocess.run([cmake, "--build", str(directory)], check=True, env=environment)
    return directory / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"


def stage(core: Path, packages: Path) -> None:
    """The package as links into `src`, with the native module `core`."""
    shutil.rmtree(packages, ignore_errors=True)
    (packages / "prefixkv").mkdir(parents=True)
    for path in [*SOURCE.iterdir(), core]:
        if path == core or (path.suffix != ".so" and path.name != "__pycache__"):
            (packages / "prefixkv" / path.name).symlink_to(path)


def environment(directory: Path, packages: Path) -> Path:
    """The interpreter of an environment that finds `packages` before what this one has.

    A path file that lists a directory does not run the path files in it, so the hook of an editable
    installation stays out.
    """
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    site = directory / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "sanitized.pth").write_text(f"{packages}\n{sysconfig.get_paths()['purelib']}\n")
    return python


def libraries(sanitizers: str) -> list[str]:
    """What must be loaded before Python, which is not built with the sanitizer itself."""
    runtime = "libtsan.so" if "thread" in sanitizers else "libasan.so"
    # The C++ library too: the sanitizer looks for what it wraps there when the process starts.
    files = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in (runtime, "libstdc++.so")
    ]
    return [str(Path(file).resolve()) for file in files]


def main(sanitizers: str, *arguments: str) -> int:
    directory = ROOT / "build" / sanitizers.replace(",", "-")
    packages = directory / "packages"
    stage(build(sanitizers, directory), packages)
    python = environment(directory / "venv", packages)
    # In files, so that those of child processes are seen too; only UBSan prints its own always.
    reports = directory / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    options = {name: f"{value}:log_path={reports}/report" for name, value in OPTIONS.items()}
    variables = {**os.environ, **options, "LD_PRELOAD": ":".join(libraries(sanitizers))}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run([python, *arguments], env=variables, cwd=ROOT, check=False)
    found = sorted(reports.iterdir())
    for report in found:
        print(report.read_text(errors="replace"), file=sys.stderr)
    return 1 if found else done.returncode


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

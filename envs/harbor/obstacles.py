"""What of a task only a container, a network or another machine can do."""

import re
import shutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from offbeat.envs.harbor.dockerfile import NETWORK, read_dockerfile
from offbeat.envs.harbor.images import task_image
from offbeat.envs.harbor.task import EnvironmentSection, HarborTask, TaskFile, TaskStep
from offbeat.envs.sandbox.shell import TASK_IMAGE, command_env

TEMPLATE = re.compile(r"\$\{([^}:]+)(:-.*)?\}")
PROGRAMS = re.compile(
    r"(?:^|[\s;&|(`])(pytest|node|gcc|g\+\+|clang|make|cmake|java|javac|go|rustc|ruby|php|git|sqlite3|psql|jq|tmux)\s"
)
"""Programs that a verifier may call and a machine may lack."""
INSTALLERS = ("apt-get", "apt", "apk", "yum", "dnf")
"""Of packages of the system, in the image's own folders."""


@lru_cache(maxsize=4096)
def find_obstacles(task: HarborTask, *, image: str | None = None, has_network: bool = False) -> tuple[str, ...]:
    """Return why a task can't run in a shell of the sandbox; empty if it can.

    image: of a container, so that this machine's programs do not matter; `task`: the task's own, where its Dockerfile was
    carried out. has_network: whether verifiers have one where `task.toml` allows it.
    """
    found = [*_of_images(task, image), *_of_environment(task)]
    if image != TASK_IMAGE:
        found += [f"its Dockerfile: {obstacle}" for obstacle in read_dockerfile(task.dockerfile).obstacles]
    found += [*_of_network(task.file), *_of_verifiers(task, image, has_network=has_network)]
    return tuple(dict.fromkeys(found))


def _of_images(task: HarborTask, image: str | None) -> Iterator[str]:
    if image == TASK_IMAGE:
        try:
            task_image(task)
        except ValueError as error:
            yield str(error)
    if image is not None:
        return
    if (own := task.file.environment.docker_image) and not task.dockerfile.is_file():
        yield f"the image {own}"
    yield from (f"its Dockerfile: its image {base}" for base in read_dockerfile(task.dockerfile).images)


def _of_environment(task: HarborTask) -> Iterator[str]:
    folder, section = task.folder / "environment", task.file.environment
    yield from _of_section(section)
    others = [
        path.name for path in folder.glob("*") if re.fullmatch(r"(docker-|singularity-)?compose\.ya?ml", path.name)
    ]
    yield from (f"environment/{name}: several services" for name in sorted(others))
    if section.workdir and not section.workdir.startswith("/"):
        yield f"workdir {section.workdir}: not an absolute path"
    users = {
        str(user) for user in (task.file.agent.user, task.file.verifier.user) if user not in (None, "root", 0, "0")
    }
    if users:
        yield f"the user {', '.join(sorted(users))}: a shell has one user"


def _of_section(section: EnvironmentSection) -> Iterator[str]:
    if section.os.lower() != "linux":
        yield f"the system {section.os}"
    if section.gpus or section.tpu:
        yield "a GPU" if section.gpus else "a TPU"
    if section.mcp_servers:
        yield "MCP servers"
    if section.healthcheck:
        yield "a healthcheck, so a service"
    yield from _templates("environment.env", section.env)


def _of_network(file: TaskFile) -> Iterator[str]:
    steps = [section for step in file.steps or () for section in (step.agent, step.verifier)]
    if any(section.network_mode == "allowlist" for section in (file.environment, file.agent, file.verifier, *steps)):
        yield "network_mode allowlist: a shell's network can't be limited to hosts"


def _of_verifiers(task: HarborTask, image: str | None, *, has_network: bool) -> Iterator[str]:
    sections = [task.file.verifier, *(step.verifier for step in task.file.steps or ())]
    if any(section.mode == "separate" for section in sections):
        yield "a verifier in an environment of its own"
    if any(section.collect for section in sections):
        yield "commands that collect files from services"
    if any(step.healthcheck for step in task.file.steps or ()):
        yield "a healthcheck, so a service"
    for step in task.steps:
        yield from _templates("verifier.env", step.verifier_env)
        yield from _of_downloads(step, image, is_last=step is task.steps[-1], has_network=has_network)
        yield from _of_scripts(step, in_container=image is not None)


def _of_downloads(step: TaskStep, image: str | None, *, is_last: bool, has_network: bool) -> Iterator[str]:
    for path, text in _scripts(step):
        names = list(dict.fromkeys(NETWORK.findall(text)))
        for name in names if has_network else names[:1]:
            call = f"its verifier calls {name} (tests/{path.name})"
            if not has_network:
                yield f"{call}: needs the network (sandbox: {{image: task, network: verifier}})"
            elif step.verifier_network != "public":
                yield f"{call}: needs the network, which task.toml rules out"
            elif name in INSTALLERS and image != TASK_IMAGE:
                yield f"{call}: needs an image that it can change (image: task)"
            elif name in INSTALLERS and not is_last:
                yield f"{call}: before another step, where its packages count as changed programs"


def _scripts(step: TaskStep) -> Iterator[tuple[Path, str]]:
    """Yield a verifier's scripts, without comments."""
    for path in (script for tests in step.tests for script in sorted(tests.glob("*.sh"))):
        yield path, "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))


def _of_scripts(step: TaskStep, *, in_container: bool) -> Iterator[str]:
    for path, text in _scripts(step):
        for program in () if in_container else sorted(set(PROGRAMS.findall(text))):
            if shutil.which(program, path=command_env()["PATH"]) is None:
                yield f"its verifier calls {program} (tests/{path.name}), which is not installed here"


def _templates(key: str, variables: dict[str, str]) -> Iterator[str]:
    """Yield variables from the worker's own environment, which a sandbox never sees."""
    for name, value in variables.items():
        if (match := TEMPLATE.fullmatch(value)) and match[2] is None:
            yield f"{key}.{name}: ${{{match[1]}}} of the host"


def resolve(variables: dict[str, str]) -> dict[str, str]:
    """Replace templates by their defaults."""
    return {name: _default(value) for name, value in variables.items()}


def _default(value: str) -> str:
    match = TEMPLATE.fullmatch(value)
    return (match[2] or "").removeprefix(":-") if match else value

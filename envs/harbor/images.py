"""Images of tasks' own (`sandbox: {image: task}`): named in task.toml, or built of the Dockerfile before a run.

Invariant: a built image's name has a digest of the folder that it is built of, so that a changed task needs another one.
"""

import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path

from offbeat.envs.harbor.dockerfile import Build
from offbeat.envs.harbor.task import HarborTask
from offbeat.envs.sandbox.backend import check_sandbox
from offbeat.envs.sandbox.container_engine import Image, find_image, is_in_podman
from offbeat.envs.sandbox.run import IsolationError
from offbeat.envs.sandbox.shell import IMAGE, TASK_IMAGE, ShellLimits

BUILT = "localhost/offbeat-task"
ROOT_USERS = ("", "root", "0", "root:root", "0:0", "0:root")
NUM_ENGINE_CALLS = 8
"""At a time."""
MAX_NAMED = 5
"""Tasks in a message."""


class ImageBuildError(RuntimeError):
    """An image that can't be pulled or built."""


def name_image(docker_image: str | None, environment: Path) -> str:
    """Return the image's name, of task.toml or of the Dockerfile in `environment`; raises ValueError without both."""
    if docker_image is not None:
        if not re.fullmatch(IMAGE, docker_image):
            raise ValueError(f"environment.docker_image {docker_image!r}: not the name of an image")
        return docker_image
    if not (environment / "Dockerfile").is_file():
        raise ValueError("no image of its own: neither environment.docker_image nor environment/Dockerfile")
    return f"{BUILT}:{_digest(environment.resolve())}"


def task_image(task: HarborTask) -> str:
    """Return the name of a task's own image; raises ValueError if it has none."""
    return name_image(task.file.environment.docker_image, task.folder / "environment")


def image_build(image: Image) -> Build:
    """Return what is left to do in a container of the task's own image, which is nothing.

    Raises:
        IsolationError: it is not root's, or docker's alone, which does not tell from outside what was changed.
    """
    if image.command[0] != "podman":
        raise IsolationError(f"image {image.name}: docker has it, and a task's own image needs podman")
    if image.user not in ROOT_USERS:
        raise IsolationError(f"image {image.name}: its user is {image.user}, and a shell's is root")
    return Build((), image.workdir, {}, (), ())


def check_machine(tasks: Sequence[HarborTask], limits: ShellLimits) -> None:
    """Raise IsolationError, with what to do, if this machine can't isolate a shell, or lacks images of tasks."""
    if limits.image != TASK_IMAGE:
        check_sandbox(limits)
        return
    with ThreadPoolExecutor(NUM_ENGINE_CALLS) as pool:
        errors = [error for error in pool.map(partial(_find_error, limits), tasks) if error]
    if errors:
        more = f"; and {len(errors) - MAX_NAMED} more" if len(errors) > MAX_NAMED else ""
        raise IsolationError(
            f"images of {len(errors)} of {len(tasks)} tasks can't be used here (`offbeat env tasks FOLDER --image task "
            f"--build` pulls or builds them): {'; '.join(errors[:MAX_NAMED])}{more}"
        )
    check_sandbox(_own_limits(tasks[0], limits))


def require_image(task: HarborTask, *, build: bool = False) -> None:
    """Find a task's own image. build: pull or build it, with its engine's output, if it is missing.

    Raises:
        ImageBuildError: it could not be pulled or built.
        IsolationError: it is not on this machine, or not root's, or podman is missing.
        ValueError: the task has none.
    """
    limits = ShellLimits(image=task_image(task))
    if build and not is_in_podman(task_image(task)):
        command = _build_command(task)
        if subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode:
            raise ImageBuildError(f"`{' '.join(command)}` failed")
    image_build(find_image(limits))


def _build_command(task: HarborTask) -> Sequence[str]:
    name, folder = task_image(task), task.folder / "environment"
    if task.file.environment.docker_image is not None:
        return ["podman", "pull", name]
    return ["podman", "build", "--tag", name, "--file", str(folder / "Dockerfile"), str(folder)]


def _own_limits(task: HarborTask, limits: ShellLimits) -> ShellLimits:
    return limits.model_copy(update={"image": task_image(task)})


def _find_error(limits: ShellLimits, task: HarborTask) -> str:
    try:
        image_build(find_image(_own_limits(task, limits)))
    except (IsolationError, ValueError) as error:
        return f"{task.name}: {error}"
    return ""


@lru_cache(maxsize=4096)
def _digest(folder: Path) -> str:
    digest = blake2b(digest_size=10)
    for path in sorted(folder.rglob("*")):
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        head = f"{path.relative_to(folder).as_posix()}\0{path.lstat().st_mode:o}\0{len(content)}\0"
        digest.update(head.encode(errors="surrogateescape") + content)
    return digest.hexdigest()

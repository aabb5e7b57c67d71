"""Offbeat's sandbox as an environment of Harbor (0.25, Python 3.12): the kernel's, or a container with `limits.image`.

`harbor run --env offbeat.deploy.sandboxes.harbor:SandboxEnvironment` plays a task in it, with agents that run outside of
it, as it has no network. Before a task's tests arrive, the machine is protected from what the agent left.
"""

import asyncio
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from offbeat.envs.harbor.dockerfile import read_dockerfile
from offbeat.envs.harbor.file_list import SCRIPT, read_entries
from offbeat.envs.harbor.images import name_image
from offbeat.envs.harbor.machine import TESTS, TaskMachine
from offbeat.envs.harbor.task import read_files
from offbeat.envs.optional_imports import require
from offbeat.envs.sandbox.shell import TASK_IMAGE, ShellLimits, UploadedFile

base: Any = require("harbor.environments.base", "harbor")
capabilities: Any = require("harbor.environments.capabilities", "harbor")

DEFAULT_TIMEOUT_S = 3600.0
MAX_FILE_BYTES = 256 << 20
MAX_OUTPUT_CHARS = 1_000_000


class SandboxEnvironment(base.BaseEnvironment):
    """A policy's shell; keyword arguments of the environment set its limits."""

    def __init__(self, *args: Any, limits: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """limits: of `ShellLimits`."""
        self._limits = ShellLimits.model_validate({"max_output_chars": MAX_OUTPUT_CHARS, **(limits or {})})
        if self._limits.network != "none":
            raise ValueError(
                "limits.network: Harbor's environment has no network; tasks of `env_type: harbor` can have one"
            )
        self._machine: TaskMachine | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "offbeat-sandbox"

    @property
    def capabilities(self) -> Any:
        return capabilities.EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Raise ValueError for a task that needs a container."""
        if (self.environment_dir / "docker-compose.yaml").is_file():
            raise ValueError(f"{self.environment_name} needs a container: several services")
        if self._limits.image == TASK_IMAGE:
            name_image(self.task_env_config.docker_image, Path(self.environment_dir))
            return
        build = read_dockerfile(self._dockerfile)
        obstacles = [f"its Dockerfile: {text}" for text in build.obstacles]
        if not self._limits.image:
            obstacles += [f"its Dockerfile: its image {image}" for image in build.images]
            if self.task_env_config.docker_image and not self._dockerfile.is_file():
                obstacles.append(f"the image {self.task_env_config.docker_image}")
        if obstacles:
            raise ValueError(f"{self.environment_name} needs a container: {'; '.join(obstacles)}")

    async def start(self, force_build: bool) -> None:  # noqa: ARG002 (each start builds)
        if self.network_policy.network_mode == "public":
            self.logger.warning("%s allows the network, which the sandbox does not have", self.environment_name)
        config, folder, env = self.task_env_config, Path(self.environment_dir), self._startup_env()
        start = partial(TaskMachine, docker_image=config.docker_image, workdir=config.workdir, env=env)
        self._machine = await asyncio.to_thread(start, folder.parent, folder, self._limits)
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:  # noqa: ARG002 (nothing is left)
        if self._machine is not None:
            await asyncio.to_thread(self._machine.shell.close)
            self._machine = None

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await asyncio.to_thread(self._upload_file, Path(source_path), PurePosixPath(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await asyncio.to_thread(self._upload_dir, Path(source_dir), target_dir.rstrip("/"))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Raises FileNotFoundError."""
        await asyncio.to_thread(self._download_file, source_path, Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy folders and regular files; raises FileNotFoundError without the folder, ValueError for a list of files
        that the sandbox's programs changed."""
        await asyncio.to_thread(self._download_dir, source_dir.rstrip("/"), Path(target_dir))

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Any:
        """Run a command as the sandbox's only user.

        Raises:
            RuntimeError: it timed out, or needs another user.
        """
        resolved = self._resolve_user(user)
        if resolved not in (None, "root", 0, "0"):
            raise RuntimeError(f"the sandbox has one user, and the task asks for {resolved}")
        result = await asyncio.to_thread(
            self._started().run,
            ("bash", "-c", command),
            timeout_sec or DEFAULT_TIMEOUT_S,
            cwd=cwd,
            env=self._merge_env(env),
        )
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return base.ExecResult(stdout=result.output, stderr="", return_code=result.exit_code)

    @property
    def _dockerfile(self) -> Path:
        return Path(self.environment_dir) / "Dockerfile"

    def _started(self) -> TaskMachine:
        if self._machine is None:
            raise RuntimeError("the environment is not started")
        return self._machine

    def _upload_file(self, source: Path, target: PurePosixPath) -> None:
        self._started().shell.upload(str(target.parent), {target.name: UploadedFile.of(source)})

    def _upload_dir(self, source: Path, target: str) -> None:
        machine = self._started()
        if target == TESTS:
            machine.protect()
        machine.shell.upload(target, read_files(source))

    def _download_file(self, source: str, target: Path) -> None:
        content = self._started().shell.read(source, MAX_FILE_BYTES)
        if content is None:
            raise FileNotFoundError(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def _download_dir(self, source: str, target: Path) -> None:
        machine = self._started()
        result = machine.run(("bash", "-o", "pipefail", "-c", SCRIPT, "bash", source), DEFAULT_TIMEOUT_S)
        if result.exit_code:
            raise FileNotFoundError(f"{source}: {result.output.strip()}")
        target.mkdir(parents=True, exist_ok=True)
        for kind, path in read_entries(result.output):
            if kind == "d":
                (target / path).mkdir(parents=True, exist_ok=True)
            else:
                self._download_file(f"{source}/{path}", target / path)

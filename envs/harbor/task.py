"""Task folders in Harbor's format, as of its schema 1.4 (harbor 0.25).

Keys that do not change what runs here are ignored, as Harbor ignores unknown ones; `obstacles` reports the others.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from offbeat.envs.sandbox.shell import UploadedFile

CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
IGNORED_FILES = (".harborignore",)
STEP_FOLDERS = ("tests", "solution", "workdir")


class Section(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


NetworkMode = Literal["no-network", "public", "allowlist"]


class NetworkSection(Section):
    network_mode: NetworkMode | None = None


class EnvironmentSection(NetworkSection):
    allow_internet: bool | None = None
    """Of older tasks, in place of `network_mode`."""
    docker_image: str | None = None
    os: str = "linux"
    gpus: int | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    env: dict[str, str] = Field(default_factory=dict[str, str])
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None

    @property
    def default_network(self) -> NetworkMode:
        """Return the mode of phases without one of their own."""
        return self.network_mode or ("no-network" if self.allow_internet is False else "public")


class AgentSection(NetworkSection):
    timeout_sec: float | None = None
    user: str | int | None = None


class VerifierSection(NetworkSection):
    timeout_sec: float = 600.0
    env: dict[str, str] = Field(default_factory=dict[str, str])
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        return self.environment_mode or ("separate" if self.environment is not None else None)


class SolutionSection(Section):
    env: dict[str, str] = Field(default_factory=dict[str, str])


class StepSection(Section):
    name: str = Field(pattern=r"^[^/\\.][^/\\]*$")
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    min_reward: float | dict[str, float] | None = None
    healthcheck: dict[str, Any] | None = None


class TaskFile(Section):
    """`task.toml`."""

    schema_version: str = "1.4"
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    verifier: VerifierSection = VerifierSection()
    agent: AgentSection = AgentSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepSection] | None = None

    @model_validator(mode="before")
    @classmethod
    def _rename_version(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {"schema_version": data["version"], **data} if "version" in data else data


@dataclass(frozen=True, eq=False)
class TaskStep:
    name: str
    instruction: str
    tests: tuple[Path, ...]
    """Folders whose files are the verifier, the step's own last; `test.sh` is its script."""
    solution: Path
    workdir: Path | None
    """Files added before the step."""
    agent_timeout_s: float | None
    verifier_timeout_s: float
    verifier_env: dict[str, str]
    min_reward: dict[str, float]
    agent_network: NetworkMode
    verifier_network: NetworkMode


@dataclass(frozen=True, eq=False)
class HarborTask:
    folder: Path
    file: TaskFile
    steps: tuple[TaskStep, ...]
    """One, for a task without `[[steps]]`."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def dockerfile(self) -> Path:
        return self.folder / "environment/Dockerfile"


def find_tasks(root: Path) -> tuple[HarborTask, ...]:
    """Load the tasks below a folder, or the folder's own, in order of their paths.

    Raises:
        ValueError: there is none, or one can't be read.
    """
    if not root.is_dir():
        raise ValueError(f"no such folder: {root}")
    folders = dict.fromkeys(path.parent for path in sorted(root.rglob("task.toml")))
    outermost = [folder for folder in folders if folders.keys().isdisjoint(folder.parents)]
    if not outermost:
        raise ValueError(f"{root} has no task: a task is a folder with task.toml, instruction.md and tests/test.sh")
    counts = Counter(folder.name for folder in outermost)
    if duplicates := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"{root} has several tasks named {', '.join(duplicates)}")
    return tuple(load_task(folder) for folder in outermost)


def load_task(folder: Path) -> HarborTask:
    """Load a task; raises ValueError with the file that is wrong."""
    path = folder / "task.toml"
    _check_inside(folder, "task.toml", "instruction.md", "environment", "environment/Dockerfile", "tests", "solution")
    try:
        file = TaskFile.model_validate(tomllib.loads(path.read_text()))
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in details["loc"])
        raise ValueError(f"{path}: {key}: {details['msg']}, got {details['input']!r}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    steps = tuple(_multi_steps(folder, file)) if file.steps else (_single_step(folder, file),)
    for step in steps:
        scripts = [tests / "test.sh" for tests in step.tests]
        if not any(script.is_file() for script in scripts) and file.environment.os.lower() == "linux":
            raise ValueError(f"{scripts[-1]}: no such file; it is a task's verifier, which writes its reward")
    return HarborTask(folder, file, steps)


def read_files(folder: Path) -> dict[str, UploadedFile]:
    """Read a folder for `Shell.upload`; raises ValueError for a link out of it."""
    files: dict[str, UploadedFile] = {}
    for path in sorted(folder.rglob("*")):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} leads out of {folder}")
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            files[name] = UploadedFile(None)
        elif path.name not in IGNORED_FILES:
            files[name] = UploadedFile.of(path)
    return files


def _check_inside(folder: Path, *names: str) -> None:
    """Raise ValueError for a link out of a task's folder, which would show its agent files of the host."""
    for name in names:
        if (folder / name).exists() and not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{folder / name} leads out of {folder}")


def _single_step(folder: Path, file: TaskFile) -> TaskStep:
    return TaskStep(
        name="",
        instruction=_read_instruction(folder / "instruction.md"),
        tests=(folder / "tests",),
        solution=folder / "solution",
        workdir=None,
        agent_timeout_s=file.agent.timeout_sec,
        verifier_timeout_s=file.verifier.timeout_sec,
        verifier_env=file.verifier.env,
        min_reward={},
        agent_network=file.agent.network_mode or file.environment.default_network,
        verifier_network=file.verifier.network_mode or file.environment.default_network,
    )


def _multi_steps(folder: Path, file: TaskFile) -> Iterator[TaskStep]:
    default = file.environment.default_network
    for section in file.steps or ():
        step = folder / "steps" / section.name
        _check_inside(folder, *(f"steps/{section.name}/{name}" for name in ("instruction.md", *STEP_FOLDERS)))
        own, shared, agent_timeout_s = step / "tests", folder / "tests", section.agent.timeout_sec
        yield TaskStep(
            name=section.name,
            instruction=_read_instruction(step / "instruction.md"),
            tests=tuple(path for path in (shared, own) if path.is_dir()) or (own,),
            solution=step / "solution" if (step / "solution").is_dir() else folder / "solution",
            workdir=step / "workdir" if (step / "workdir").is_dir() else None,
            agent_timeout_s=file.agent.timeout_sec if agent_timeout_s is None else agent_timeout_s,
            verifier_timeout_s=section.verifier.timeout_sec,
            verifier_env={**file.verifier.env, **section.verifier.env},
            min_reward=_thresholds(section.min_reward),
            agent_network=section.agent.network_mode or file.agent.network_mode or default,
            verifier_network=section.verifier.network_mode or file.verifier.network_mode or default,
        )


def _thresholds(min_reward: float | dict[str, float] | None) -> dict[str, float]:
    if min_reward is None:
        return {}
    return min_reward if isinstance(min_reward, dict) else {"reward": min_reward}


def _read_instruction(path: Path) -> str:
    """Read an instruction without the canary lines at its head."""
    try:
        lines = path.read_text().split("\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    while lines and CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines).strip()

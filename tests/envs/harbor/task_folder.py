"""A task of a test, written to a folder; and the mark of tests that start a shell."""

from pathlib import Path

from offbeat.envs.harbor import HarborConfig, HarborEnv
from tests.envs.sandbox.test_shell import needs_shell

__all__ = ["TaskFolder", "needs_shell"]


class TaskFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("task.toml", "")
        self.write("instruction.md", "do it\n")
        self.write("environment/Dockerfile", "FROM ubuntu:24.04\nWORKDIR /app\n")
        self.write("tests/test.sh", "cat /app/answer > /logs/verifier/reward.txt\n")

    def write(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(text)

    def env(self, **settings: object) -> HarborEnv:
        settings = {"split": "any", "tasks_dir": self.path, "action_pattern": "^(.*)$", **settings}
        return HarborEnv(HarborConfig.model_validate(settings))

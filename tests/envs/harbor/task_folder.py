"""A task of a test, written to a folder; and the mark of tests that start a shell."""

from pathlib import Path

from offbeat.envs.harbor import HarborConfig, HarborEnv
from tests.envs.sandbox.images import IMAGE
from tests.envs.sandbox.test_shell import needs_shell

__all__ = ["TaskFolder", "needs_shell", "write_image_task"]
DOCKERFILE = f"""
FROM {IMAGE}
COPY answer /testbed/answer
WORKDIR /tmp
ENV ANSWER=/testbed/answer PATH=/usr/local/bin:/usr/bin
COPY answer /usr/local/bin/
WORKDIR /testbed
"""
VERIFIER = """
cmp -s "$ANSWER" /tests/expected && echo 1 > /logs/verifier/reward.txt
[ -f /logs/verifier/reward.txt ] || echo 0 > /logs/verifier/reward.txt
"""


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


def write_image_task(path: Path, answer: str = "wrong") -> TaskFolder:
    """Write a task for an image of its own, with a wrong answer in it."""
    task = TaskFolder(path)
    task.write("environment/Dockerfile", DOCKERFILE)
    task.write("environment/answer", f"{answer}\n")
    task.write("tests/test.sh", VERIFIER)
    task.write("tests/expected", "right\n")
    task.write("solution/solve.sh", "echo right > answer\n")
    return task

"""Task of an external agent; imports only the standard library.

    def play(task: AgentTask) -> float | str | dict | None

Return value: the reward; `{"reward": ..., "metrics": {...}}`; a string, the answer for the env; or None after
`task.step`.
"""

import json
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

MAX_VARIABLE_BYTES = 131_072
"""Limit of Linux for `NAME=value` in an environment, with the zero byte at its end."""


@dataclass(frozen=True, slots=True)
class EnvReply:
    """The env's response."""

    observation: str
    reward: float
    done: bool
    """Whether the env or `max_steps` ended the episode."""
    metrics: dict[str, float]
    """Metrics that are finite."""


@dataclass(slots=True)
class AgentTask:
    """One episode."""

    base_url: str
    """OpenAI's base URL."""
    api_key: str
    """Key for all APIs and `env_url`, valid for this episode."""
    anthropic_base_url: str
    env_url: str
    """GET returns the task; POST `{"action": "..."}` to `/step` below it returns an `EnvReply`."""
    model: str
    tag: str
    seed: int
    system_prompt: str
    observation: str
    """First observation."""
    max_steps: int
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Conversation to answer in OpenAI's form, with earlier messages and images, of a dataset's row; else empty."""
    _idle: list[HTTPConnection] = field(default_factory=list[HTTPConnection], repr=False, compare=False)
    """Connections that no call uses."""

    def step(self, action: str) -> EnvReply:
        """Step the env; calls of several threads take turns.

        Raises:
            RuntimeError: the env failed, or the episode ended.
        """
        address = urlsplit(self.env_url)
        try:
            connection = self._idle.pop()  # of one thread alone
        except IndexError:
            connection = HTTPConnection(address.netloc)
        try:
            if connection.sock is not None and _is_readable(connection.sock):
                connection.close()  # the server closed it while the agent was idle; the request reopens it
            headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
            connection.request("POST", f"{address.path}/step", json.dumps({"action": action}), headers)
            answer = connection.getresponse()
            body = json.loads(answer.read())
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        if answer.status != 200:
            raise RuntimeError(body["error"]["message"])
        return EnvReply(**body)

    def environment(self) -> dict[str, str]:
        """Return a command's environment: OpenAI's and Anthropic's variables, and the task as JSON if it fits."""
        task = json.dumps(self.plain())
        fits = len(f"OFFBEAT_TASK={task}") < MAX_VARIABLE_BYTES
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            **({"OFFBEAT_TASK": task} if fits else {}),
        }

    def plain(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "_idle"}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> "AgentTask":
        """Parse `plain()` or the decoded `OFFBEAT_TASK`."""
        return cls(**plain)


def _is_readable(connection: socket.socket) -> bool:
    """Return whether data or the end can be read; `select.select` refuses descriptors above 1023."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))

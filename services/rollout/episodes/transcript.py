"""Conversation of an episode, for rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.envs.dataset.prompt import message_content
from offbeat.envs.prompts import ROW_IMAGE
from offbeat.envs.tools.functions import Call, write_calls, write_results
from offbeat.services.chat.messages import ChatMessage


@dataclass(slots=True)
class Transcript:
    """Messages in OpenAI's form, ending with the policy's last answer once there is one."""

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    row: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the env gave about the task (`reward_row`)."""
    is_chat: bool = True
    """Whether the chat template began the last answer, not a prompt of the agent's."""
    has_left_env: bool = False
    """Whether an agent took steps, and ended before the env."""

    @property
    def prompt(self) -> Sequence[Mapping[str, Any]]:
        return self.messages[:-1]

    @property
    def response(self) -> str:
        return str(self.messages[-1]["content"])

    def begin(self, system: str, opening: Sequence[str], images: Sequence[bytes] = ()) -> None:
        """Add a system message, unless empty, and texts of user and assistant with the first of `images`."""
        left = iter(images)
        if system:
            self.messages.append({"role": "system", "content": system})
        for number, text in enumerate(opening):
            content = message_content(text, left) if images else text
            self.messages.append({"role": ("user", "assistant")[number % 2], "content": content})

    def add(self, role: str, text: str, images: Sequence[bytes] = ()) -> None:
        """Add a message. images: PNG, in place of each `ROW_IMAGE` of the text."""
        self.messages.append({"role": role, "content": message_content(text, iter(images)) if images else text})

    def read(self, messages: Sequence[ChatMessage], *, is_chat: bool) -> None:
        """Take an agent's conversation, with calls and results of functions as the policy's own have them."""
        self.messages, self.is_chat = [], is_chat
        results: list[ChatMessage] = []
        for message in messages:
            if message.role == "tool":
                results.append(message)
                continue
            self._add_results(results)
            calls = [Call(call.name, call.parsed()) for call in message.tool_calls]
            self.add(message.role, write_calls(message.content, calls), message.images)
        self._add_results(results)

    def _add_results(self, results: list[ChatMessage]) -> None:
        if results:
            texts = [each.content if each.images else each.content.replace(ROW_IMAGE, "") for each in results]
            self.add("user", write_results(texts), [image for each in results for image in each.images])
            results.clear()

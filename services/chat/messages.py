"""What an agent says and is told, whichever API it speaks.

Invariant: two assistant messages are the same when their words are, up to space around them, and their tool calls are, up
to how JSON is spaced: agents and their frameworks change both on the way.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function that the agent offered."""

    name: str
    arguments: str
    """JSON in one form: sorted keys, no space."""
    call_id: str = field(default="", compare=False)

    def parsed(self) -> Any:
        """The arguments as an object."""
        return json.loads(self.arguments)


class CallStyle(NamedTuple):
    """How a chat template wants the calls of an assistant's message."""

    text_arguments: bool = False
    """As JSON text, not as an object."""
    no_content: bool = False
    """Without words `content` is None, not empty."""


CALL_STYLES = (CallStyle(), CallStyle(text_arguments=True), CallStyle(no_content=True), CallStyle(True, True))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    """`reasoning_content`, for templates that show it."""

    def says_the_same_as(self, other: "ChatMessage") -> bool:
        """Whether an assistant message that came back is one that was sent."""
        return self.content.strip() == other.content.strip() and self.tool_calls == other.tool_calls

    def with_call_ids(self, number: int) -> "ChatMessage":
        """Calls named by the answer's number and their place, in nine letters and digits, as Mistral's templates want."""
        calls = (replace(call, call_id=f"c{number:04d}{i:04d}") for i, call in enumerate(self.tool_calls))
        return replace(self, tool_calls=tuple(calls))

    def for_template(self, style: CallStyle = CALL_STYLES[0]) -> dict[str, Any]:
        """As chat templates read it."""
        without = style.no_content and self.tool_calls and not self.content
        message: dict[str, Any] = {"role": self.role, "content": None if without else self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if style.text_arguments else call.parsed(),
                    },
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message


Tools = tuple[Mapping[str, Any], ...]
"""Functions in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


CallParser = Callable[[str, Tools], tuple[str, tuple[ToolCall, ...]]]
"""(answer, tools that were offered) -> (words beside the calls, calls)."""


def one_form(arguments: str | Mapping[str, Any]) -> str:
    """Arguments of a call in one form.

    Raises:
        ValueError: they are no JSON object.
    """
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(value, Mapping):
        raise ValueError(f"the arguments of a tool call are a {type(value).__name__}, not an object")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

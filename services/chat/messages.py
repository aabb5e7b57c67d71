"""API-independent chat messages.

Invariant: equality of assistant messages ignores surrounding whitespace, and JSON spacing and order of keys of tool
calls.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON without spaces, keys in the order in which they were written."""
    call_id: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError if the name has half of a surrogate pair."""
        self.name.encode()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToolCall) or self.name != other.name:
            return False
        return self.arguments == other.arguments or _sort_keys(self.arguments) == _sort_keys(other.arguments)

    def __hash__(self) -> int:
        return hash(self.name)

    def parsed(self) -> Any:
        return json.loads(self.arguments)


class CallStyle(NamedTuple):
    text_arguments: bool = False
    """Arguments as JSON text, not an object."""
    no_content: bool = False
    """None instead of empty content."""


CALL_STYLES = (CallStyle(), CallStyle(text_arguments=True), CallStyle(no_content=True), CallStyle(True, True))


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    """`reasoning_content`, for templates that render it."""
    images: tuple[bytes, ...] = ()
    """In place of each `ROW_IMAGE` of the content."""

    def is_same_answer(self, other: "ChatMessage") -> bool:
        return self.content.strip() == other.content.strip() and self.tool_calls == other.tool_calls

    def with_call_ids(self, number: int) -> "ChatMessage":
        """Set call ids of nine letters and digits (Mistral's templates), by the answer's number and position."""
        calls = (replace(call, call_id=f"c{number:04d}{i:04d}") for i, call in enumerate(self.tool_calls))
        return replace(self, tool_calls=tuple(calls))

    def for_template(self, style: CallStyle = CALL_STYLES[0]) -> dict[str, Any]:
        omits_content = style.no_content and self.tool_calls and not self.content
        message: dict[str, Any] = {"role": self.role, "content": None if omits_content else self.content}
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
"""OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


CallParser = Callable[[str, Tools], tuple[str, tuple[ToolCall, ...]]]
"""(answer, offered tools) -> (remaining text, calls)."""


def normalize_arguments(arguments: str | Mapping[str, Any]) -> str:
    """Return arguments as JSON without spaces.

    Raises:
        ValueError: not a JSON object, a number that is not finite, half of a surrogate pair, or too deeply nested.
    """
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(value, Mapping):
            raise ValueError(f"the arguments of a tool call are a {type(value).__name__}, not an object")
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("the arguments of a tool call are too deeply nested") from None
    text.encode()
    return text


def _sort_keys(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True)

"""Functions for the policy, and the text form of calls and results.

An env's `functions` are in OpenAI's format; `step` gets each call as `<tool_call>` and returns a `<tool_response>`
each, in order.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
OPENING, CLOSING = "<tool_response>\n", "\n</tool_response>"
BETWEEN = f"{CLOSING}\n{OPENING}"


class Function(NamedTuple):
    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema."""

    def schema(self) -> dict[str, Any]:
        """Return OpenAI's format."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def to_json(self) -> str:
        return json.dumps(self.schema(), ensure_ascii=False)


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


def write_calls(text: str, calls: Sequence[Call]) -> str:
    lines = [f"<tool_call>\n{json.dumps(call._asdict(), ensure_ascii=False)}\n</tool_call>" for call in calls]
    return "\n".join([*([text] if text else []), *lines])


def read_calls(answer: str) -> list[Call]:
    calls: list[Call] = []
    for match in CALL.findall(answer):
        try:
            calls.append(read_call(match))
        except ValueError:
            continue  # text that only resembles a call
    return calls


def read_call(text: str) -> Call:
    """Parse a JSON call, of finite numbers and text that is UTF-8; raises ValueError."""
    try:
        call = json.loads(text)
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
        name, arguments = cast(object, call["name"]), cast(object, call.get("arguments") or {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the call is not of the form {{'name': ..., 'arguments': {{...}}}}: {error}") from error
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("the call's name must be a text and its arguments an object")
    return Call(name, cast(dict[str, Any], arguments))


def write_results(results: Sequence[str]) -> str:
    return OPENING + BETWEEN.join(results) + CLOSING


def read_results(observation: str, count: int) -> list[str]:
    """Split into `count` results; without separators, the observation is the first."""
    inner = observation.removeprefix(OPENING).removesuffix(CLOSING)
    parts = inner.split(BETWEEN) if observation.startswith(OPENING) else [observation]
    return parts if len(parts) == count else [inner, *[""] * (count - 1)]

"""Probe function and calls for the analysis of a chat template."""

from offbeat.services.chat.messages import (
    ChatMessage,
    ToolCall,
    Tools,
    normalize_arguments,
)
from offbeat.services.chat.template import ChatTemplate, UnusableError

OFFERED = "offbeat_probe"
PROBE: Tools = (
    {
        "type": "function",
        "function": {
            "name": OFFERED,
            "description": "What is there.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["item", "count"],
            },
        },
    },
)
CALL = ToolCall(OFFERED, normalize_arguments({"item": "a cup of tea", "count": 2}), "probe0001")
ANOTHER = ToolCall(OFFERED, normalize_arguments({"item": "milk", "count": 3}), "probe0002")
ASKED = ChatMessage("user", "offbeatasked")


def can_render_results(template: ChatTemplate) -> bool:
    result = ChatMessage("tool", "offbeatresult", tool_call_id=CALL.call_id)
    try:
        text = template.write((ASKED, ChatMessage("assistant", "", (CALL,)), result), PROBE, prompt=True)
    except UnusableError:
        return False
    return "offbeatresult" in text

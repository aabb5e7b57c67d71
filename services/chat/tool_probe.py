"""A function that nobody has, and calls of it: by them a chat template is asked what it writes.

Invariant: nothing here reads calls back, so that who only renders needs no parser of vLLM's.
"""

from offbeat.services.chat.messages import (
    ChatMessage,
    ToolCall,
    Tools,
    one_form,
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
CALL = ToolCall(OFFERED, one_form({"item": "a cup of tea", "count": 2}), "probe0001")
ANOTHER = ToolCall(OFFERED, one_form({"item": "milk", "count": 3}), "probe0002")
ASKED = ChatMessage("user", "offbeatasked")


def takes_results(template: ChatTemplate) -> bool:
    """Whether the template writes a message of the role `tool`."""
    result = ChatMessage("tool", "offbeatresult", tool_call_id=CALL.call_id)
    try:
        whole = template.write((ASKED, ChatMessage("assistant", "", (CALL,)), result), PROBE, prompt=True)
    except UnusableError:
        return False
    return "offbeatresult" in whole

"""OpenAI's `/v1/responses` as `ModelRequest` and `ModelReply`."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offbeat.services.chat.messages import (
    ChatMessage,
    ToolCall,
    Tools,
    normalize_arguments,
)
from offbeat.services.gateway.contents import read_content, words
from offbeat.services.gateway.openai_chat import SYSTEM_ROLES
from offbeat.services.gateway.request_fields import (
    Body,
    find_ignored_parameters,
    number,
    read_object,
    read_tools,
    require,
    require_function,
    require_messages,
)
from offbeat.services.gateway.session import InvalidCallError, ModelReply, ModelRequest


def read_responses(body: Body, earlier: Sequence[ChatMessage]) -> ModelRequest:
    """Convert a request; `earlier`: of `previous_response_id`."""
    require(not body.get("prompt"), "prompt is not supported: send instructions and input")
    items = body.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    require(isinstance(items, list), "input: a text or a list of items is needed")
    instructions = body.get("instructions")
    system = (ChatMessage("system", words(instructions, "instructions")),) if instructions else ()
    messages = (*system, *earlier, *_messages(items or []))
    choice = body.get("tool_choice")
    forced = ("tool_choice",) if choice not in (None, "auto", "none") else ()
    shape = read_object(read_object(body, "text"), "format")
    shaped = ("text.format",) if shape.get("type", "text") != "text" else ()
    return ModelRequest(
        require_messages(messages),
        _tools(read_tools(body, _is_function, "functions", are_called=choice != "none")),
        reads_calls=choice != "none",
        max_tokens=number(body, "max_output_tokens"),
        ignored=find_ignored_parameters(body, (*forced, *shaped)),
    )


def without_instructions(body: Body, messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """Return messages for a later `previous_response_id`."""
    return messages[1:] if body.get("instructions") else messages


def _is_function(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "function"


def _tools(functions: Sequence[Body]) -> Tools:
    tools: list[dict[str, Any]] = []
    for tool in functions:
        require_function(tool)
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        tools.append({"type": "function", "function": function})
    return tuple(tools)


def _messages(items: Sequence[Any]) -> list[ChatMessage]:
    """Convert items; an assistant's text and following calls form one message."""
    messages: list[ChatMessage] = []
    for position, item in enumerate(items):
        where = f"input[{position}]"
        require(isinstance(item, Mapping), f"{where} is no item")
        match item.get("type", "message"):
            case "message":
                role = str(item.get("role"))
                require(role in (*SYSTEM_ROLES, "user", "assistant"), f"{where}: role {role!r} is not known")
                role = "system" if role in SYSTEM_ROLES else role
                content = read_content(item.get("content"), f"{where}.content", role=role)
                messages.append(ChatMessage(role, content.text, images=content.images))
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                output = read_content(item.get("output"), f"{where}.output", role="tool")
                call_id = str(item.get("call_id") or "")
                messages.append(ChatMessage("tool", output.text, tool_call_id=call_id, images=output.images))
            case "reasoning":
                continue
            case other:
                raise InvalidCallError(f"{where}: items of type {other!r} can't be read")
    return messages


def _add_call(messages: list[ChatMessage], item: Body, where: str) -> None:
    try:
        call = ToolCall(str(item["name"]), normalize_arguments(item["arguments"]), str(item.get("call_id") or ""))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidCallError(f"{where} is no call of a function: {error}") from error
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        messages.append(ChatMessage("assistant", last.content, (*last.tool_calls, call)))
    else:
        messages.append(ChatMessage("assistant", "", (call,)))


# --- answers --------------------------------------------------------------------------------------------------------


def write_response(body: Body, reply: ModelReply, answer_id: str, model: str) -> dict[str, Any]:
    cut = reply.finish_reason == "length"
    sampled = len(reply.token_ids)
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": _output(reply, answer_id),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + sampled,
        },
    }


def stream_response(body: Body, reply: ModelReply, answer_id: str, model: str) -> Iterator[str]:
    full = write_response(body, reply, answer_id, model)
    number_of = iter(range(1_000_000))

    def event(kind: str, **data: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': next(number_of), **data})}\n\n"

    start = {**full, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=start)
    yield event("response.in_progress", response=start)
    for position, item in enumerate(full["output"]):
        empty = {**item, "content": []} if item["type"] == "message" else {**item, "arguments": ""}
        yield event("response.output_item.added", output_index=position, item={**empty, "status": "in_progress"})
        at: dict[str, Any] = {"item_id": item["id"], "output_index": position}
        if item["type"] == "message":
            part = item["content"][0]
            yield event("response.content_part.added", **at, content_index=0, part={**part, "text": ""})
            yield event("response.output_text.delta", **at, content_index=0, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **at, content_index=0, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, content_index=0, part=part)
        else:
            arguments = item["arguments"]
            yield event("response.function_call_arguments.delta", **at, delta=arguments)
            yield event("response.function_call_arguments.done", **at, arguments=arguments, name=item["name"])
        yield event("response.output_item.done", output_index=position, item=item)
    yield event("response.incomplete" if full["incomplete_details"] else "response.completed", response=full)


def _output(reply: ModelReply, answer_id: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    if reply.message.content or not reply.message.tool_calls:
        text = {"type": "output_text", "text": reply.message.content, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "status": status}
        items.append({**message, "content": [text]})
    items += [
        {
            "id": f"fc_{call.call_id}",
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in reply.message.tool_calls
    ]
    return items

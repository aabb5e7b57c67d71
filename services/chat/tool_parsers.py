# pyright: basic
"""vLLM's parsers of tool calls; unparsable calls stay text."""

import logging
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from offbeat.services.chat.messages import (
    CallParser,
    ToolCall,
    Tools,
    normalize_arguments,
)
from offbeat.services.errors import RolloutError

logger = logging.getLogger(__name__)


def parser_names() -> Sequence[str]:
    """Import vLLM (seconds)."""
    from vllm.tool_parsers import ToolParserManager

    return sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})


def load_parser(name: str, tokenizer: Any) -> CallParser:
    """Return vLLM's parser.

    Raises:
        RolloutError: unknown name, or missing tokens.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    if name not in (names := parser_names()):
        close = get_close_matches(name, names, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise RolloutError(f"tool_call_parser: vLLM has none named {name!r}{hint}; there is {', '.join(names)}")
    parser_class = ToolParserManager.get_tool_parser(name)
    try:
        parser_class(tokenizer)
    except Exception as error:
        # parsers raise various errors if their tokens are missing
        raise RolloutError(f"tool_call_parser {name!r} does not fit this tokenizer: {error}") from error

    def parse(text: str, tools: Tools) -> tuple[str, tuple[ToolCall, ...]]:
        request = ChatCompletionRequest.model_validate({"messages": [], "tools": list(tools)})
        try:
            result = parser_class(tokenizer, [*(request.tools or ())]).extract_tool_calls(text, request)
            calls = tuple(
                ToolCall(call.function.name, normalize_arguments(call.function.arguments)) for call in result.tool_calls
            )
        except Exception:
            # the policy may write anything, and parsers raise various errors
            logger.debug("tool call parser failed; the answer stays text", exc_info=True)
            return text, ()
        return (result.content or "", calls) if result.tools_called else (text, ())

    return parse

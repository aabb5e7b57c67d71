"""An MCP server for tests, whose list of functions has two pages; the last one's cursor is the argument, if any."""

import asyncio
import sys
from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

TOOLS = [types.Tool(name=name, input_schema={"type": "object"}) for name in ("first", "second")]


async def list_tools(_: Any, parameters: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    if parameters is None or not parameters.cursor:
        return types.ListToolsResult(tools=TOOLS[:1], next_cursor="1")
    return types.ListToolsResult(tools=TOOLS[1:], next_cursor=sys.argv[1] if sys.argv[1:] else None)


async def call_tool(_: Any, parameters: types.CallToolRequestParams) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=f"{parameters.name} was called")])


async def main() -> None:
    server: Server[Any] = Server("pages", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())

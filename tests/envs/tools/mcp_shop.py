"""An MCP server for tests: over its pipes, or with a port as argument over HTTP."""

import os
import sys
import time

from mcp import MCPError
from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")


@server.tool()
def price(item: str, count: int = 1) -> str:
    """What so many cost."""
    return f"{count} {item}: {3 * count}"


@server.tool()
def broken() -> str:
    """Always fails."""
    raise RuntimeError("the till is stuck")


@server.tool()
def refuses() -> str:
    """Answers with a JSON-RPC error."""
    raise MCPError(-32602, "no such item")


@server.tool()
def sleeps() -> str:
    """Never comes back."""
    time.sleep(1000)
    return ""


@server.tool()
def who() -> str:
    """The process."""
    return str(os.getpid())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()

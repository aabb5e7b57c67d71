"""Reading `text/event-stream`, as far as the control service writes it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One event of a stream."""

    id: str
    event: str
    data: str


async def messages(lines: AsyncIterator[str]) -> AsyncIterator[Message]:
    """The events that lines of a stream carry; one that is cut off in the middle is left out."""
    fields: dict[str, str] = {}
    async for line in lines:
        if line:
            name, _, value = line.partition(":")
            if name in ("id", "event", "data"):
                fields[name] = value.removeprefix(" ")
        elif "data" in fields:
            yield Message(fields.get("id", ""), fields.get("event", "message"), fields["data"])
            fields = {}
        else:
            fields = {}

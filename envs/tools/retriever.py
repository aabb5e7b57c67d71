"""Client of a retrieval server, in the protocol of Search-R1's `retrieval_server.py`."""

import json
import urllib.error
import urllib.request
from functools import lru_cache
from http.client import HTTPException
from typing import Any, cast

MAX_REPLY_BYTES = 4 << 20


class RetrievalError(Exception):
    """A request that failed, with what the server said."""


def retrieve(url: str, query: str, top_k: int, timeout_s: float) -> list[str]:
    """POST one query; return the texts of the passages, best first.

    Raises:
        RetrievalError: no server, an error of it, or a reply in another form.
    """
    body = json.dumps({"queries": [query], "topk": top_k, "return_scores": True}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            content = reply.read(MAX_REPLY_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(200).decode(errors="replace").strip()
        raise RetrievalError(f"HTTP {error.code} {error.reason}{f': {said}' if said else ''}") from error
    except urllib.error.URLError as error:
        raise RetrievalError(str(error.reason)) from error
    except (OSError, HTTPException) as error:
        raise RetrievalError(str(error) or type(error).__name__) from error
    if len(content) > MAX_REPLY_BYTES:
        raise RetrievalError(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB")
    try:
        (passages,) = json.loads(content)["result"]
        return [_read_passage(each) for each in passages[:top_k]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RetrievalError('a reply that is not {"result": [[{"document": {"contents": ...}}, ...]]}') from error


@lru_cache(maxsize=16)
def check_server(url: str, timeout_s: float) -> None:
    """Send a query, once per process; raises ValueError if that fails."""
    try:
        retrieve(url, "test", 1, timeout_s)
    except RetrievalError as error:
        raise ValueError(f"url: {url} answers no search: {error}") from error


def _read_passage(passage: Any) -> str:
    """Return the text of a passage with or without a score; of title and text where there are no contents."""
    document = passage
    if isinstance(passage, dict):
        document = cast(dict[str, Any], passage).get("document", cast(Any, passage))
    if isinstance(document, str):
        return document
    if "contents" in document:
        return str(document["contents"])
    return "\n".join(str(part) for part in (document.get("title"), document["text"]) if part)

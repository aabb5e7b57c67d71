"""Callers of Tinker's API without `keys_file`: programs of this machine, no web page."""

import httpx
import pytest
from fastapi import Depends, FastAPI

from offbeat.services.tinker.app import _owner, _refuse
from offbeat.services.tinker.errors import TinkerError
from offbeat.services.tinker.owners import Keys

KEY = "tml-mine"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8765"}, 200),
        ({"host": "evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
async def test_a_page_of_another_site_is_refused_where_any_key_is_taken(headers: dict[str, str], status: int) -> None:
    """A name that is rebound to 127.0.0.1 makes its page's calls same-origin."""
    for allowed, expected in ((None, status), (frozenset({KEY}), 200)):
        app = FastAPI(dependencies=[Depends(_owner)])
        app.state.keys = Keys(allowed)
        app.add_exception_handler(TinkerError, _refuse)
        app.get("/")(lambda: None)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8765") as client:
            assert (await client.get("/", headers={"X-API-Key": KEY, **headers})).status_code == expected

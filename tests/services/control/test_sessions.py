"""A browser's session is a cookie of this origin, with the rights of its token; the page needs none to load."""

import httpx
import pytest

from offbeat.services.control.auth import WRONG_TOKEN_BURST
from offbeat.services.control.console.pages import FOLDER
from offbeat.services.control.sessions import COOKIE, session_of
from tests.services.control.api_harness import ApiHarness, api_harness, code

OTHER = {"origin": "http://evil.example"}


async def log_in(api: ApiHarness, token: str) -> httpx.Response:
    return await api.http.post("/session", json={"token": token})


async def test_a_session_has_the_rights_of_its_token(redis_url: str) -> None:
    async with api_harness(redis_url, "operate", "look") as api:
        await api.start("lake")
        assert (await api.http.get("/session")).json() == {"access": "none", "needs_token": True}
        opened = await log_in(api, "look")
        assert opened.json() == {"access": "read", "needs_token": True}
        cookie = opened.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert "look" not in cookie
        assert (await api.http.get("/runs/lake")).status_code == 200
        refused = await api.http.post("/runs/lake/pause")
        assert (refused.status_code, code(refused)) == (403, "read_only")
        assert (await log_in(api, "operate")).json()["access"] == "write"
        assert (await api.http.post("/runs/lake/pause")).status_code == 202
        await api.http.delete("/session")
        assert (await api.http.get("/runs/lake")).status_code == 401


async def test_a_cookie_serves_no_other_origin_and_no_other_service(redis_url: str) -> None:
    async with api_harness(redis_url, "operate") as api:
        await api.start("lake")
        await log_in(api, "operate")
        for headers in (OTHER, {"sec-fetch-site": "cross-site"}):
            assert (await api.http.post("/runs/lake/stop", headers=headers)).status_code == 401
        assert (await api.http.post("/runs/lake/stop", headers={"origin": "http://127.0.0.1"})).status_code == 202
        api.http.cookies.clear()
        api.http.cookies.set(COOKIE, session_of("another token"))
        assert (await api.http.get("/runs/lake")).status_code == 401


async def test_services_on_two_ports_of_a_host_keep_their_sessions(redis_url: str) -> None:
    """A browser sends a host's cookies to all its ports."""
    urls = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")
    async with api_harness(redis_url, "one") as first, api_harness(redis_url, "other") as second:
        mounts = {url: httpx.ASGITransport(each.api) for url, each in zip(urls, (first, second), strict=True)}
        async with httpx.AsyncClient(mounts=mounts) as browser:
            for url, token in zip(urls, ("one", "other"), strict=True):
                await browser.post(f"{url}/session", json={"token": token})
            assert [(await browser.get(f"{url}/runs")).status_code for url in urls] == [200, 200]
            await browser.delete(f"{urls[0]}/session")
            assert [(await browser.get(f"{url}/runs")).status_code for url in urls] == [401, 200]


async def test_a_session_of_a_build_without_ports_is_kept_until_log_out(redis_url: str) -> None:
    """Its cookie has another name."""
    async with api_harness(redis_url, "operate") as api:
        url = "http://127.0.0.1:8000"
        cookies = {COOKIE: session_of("operate")}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api.api), cookies=cookies) as browser:
            assert (await browser.get(f"{url}/runs")).status_code == 200
            closed = await browser.delete(f"{url}/session")
    deleted = [cookie.partition("=")[0] for cookie in closed.headers.get_list("set-cookie")]
    assert sorted(deleted) == [COOKIE, f"{COOKIE}_8000"]


async def test_wrong_logins_are_limited(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.services.control.auth.WRONG_TOKENS_PER_S", 1e-6)
    async with api_harness(redis_url, "operate") as api:
        codes = [code(await log_in(api, "guess")) for _ in range(WRONG_TOKEN_BURST + 5)]
        assert codes[0] == "unauthorized"
        assert codes[-1] == "too_many_calls"
        assert (await log_in(api, "operate")).status_code == 200


@pytest.mark.parametrize("path", ["/ui/", "/ui/js/app.js", "/ui/style.css", "/ui/vendor/uPlot.iife.min.js"])
async def test_the_page_loads_without_a_token_and_runs_only_its_own_files(redis_url: str, path: str) -> None:
    async with api_harness(redis_url, "operate") as api:
        loaded = await api.http.get(path)
        assert loaded.status_code == 200
        policy = loaded.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert loaded.headers["x-content-type-options"] == "nosniff"
        assert (await api.http.get("/ui")).headers["location"] == "/ui/"
        for outside in ("/ui/../pages.py", "/ui/%2e%2e/pages.py", "/ui/none.js"):
            assert (await api.http.get(outside)).status_code in (401, 404)


async def test_a_file_of_the_page_is_compressed_and_not_sent_again(api: ApiHarness) -> None:
    path = "/ui/vendor/uPlot.iife.min.js"
    plain = await api.http.get(path, headers={"accept-encoding": "identity"})
    packed = await api.http.get(path)
    assert packed.content == plain.content == (FOLDER / "vendor" / "uPlot.iife.min.js").read_bytes()
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"]) / 2
    assert plain.headers["content-type"].partition(";")[0] in ("text/javascript", "application/javascript")
    again = await api.http.get(path, headers={"if-none-match": packed.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == packed.headers["content-security-policy"]
    assert (await api.http.head(path)).status_code == 200
    assert (await api.http.post(path)).status_code == 405


async def test_without_tokens_the_page_of_this_machine_may_write(api: ApiHarness) -> None:
    assert (await api.http.get("/session")).json() == {"access": "write", "needs_token": False}
    assert (await api.http.get("/ui/", headers=OTHER)).status_code == 403

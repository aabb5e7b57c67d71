"""A real Chromium before the page, over a folder's server and over a control service with a real Redis."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.benchmarks.console.page import find_chromium
from offbeat.deploy.console.server import FolderRuns, create_folder_api
from offbeat.services.control.api import create_api
from offbeat.services.control.rights import NO_TOKENS, Tokens
from offbeat.services.control.run import RunState
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore
from offbeat.services.keys import RunKeys
from offbeat.services.process import free_port
from tests.deploy.console.folders import write_run
from tests.paths import ROOT
from tests.services.control.api_harness import FakeRunFactory
from tests.waiting import wait_until_sync

NODE = ROOT / ".venv" / "node" / "node_modules"
AXE = NODE / "axe-core" / "axe.min.js"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "lake", text=HOSTILE)
    write_run(folder / "pond", "pond", "seed=7", played=True)
    return folder


@contextmanager
def serving(api: FastAPI) -> Iterator[str]:
    """Yield the URL of an application that serves in a thread."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(api, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until_sync(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


@pytest.fixture(scope="session")
def folder_url(runs: Path) -> Iterator[str]:
    with serving(create_folder_api(FolderRuns(runs))) as url:
        yield url


@pytest.fixture
def serve_control(redis_url: str, runs: Path) -> Callable[[Tokens], Any]:
    """Serve a control service that knows both runs, `lake` running and `pond` finished."""

    @contextmanager
    def serve(tokens: Tokens) -> Iterator[str]:
        redis = AsyncRedis.from_url(redis_url)
        service = ControlService(RunStore(redis), FakeRunFactory(redis), wake=lambda: None)
        headers = {"Authorization": f"Bearer {tokens.operate}"} if tokens.operate else {}
        with serving(create_api(service, tokens=tokens)) as url, Redis.from_url(redis_url) as plain:
            for name, state in (("lake", RunState.RUNNING), ("pond", RunState.FINISHED)):
                body = {"exp_name": name, "output_dir": str(runs / name)}
                httpx.post(f"{url}/runs", json=body, headers=headers).raise_for_status()
                plain.hset(RunKeys(name).record, "state", state)
            yield url

    return serve


@pytest.fixture
def control_url(serve_control: Callable[[Tokens], Any]) -> Iterator[str]:
    with serve_control(NO_TOKENS) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="`make browser` installs it")
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: `make browser` installs it")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that tolerates no error of a script, no refused resource, and no call to another host."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, locale="en-US")
    context.set_default_timeout(60_000)  # a slow machine is not a failure
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(f"script: {error}"))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith(("http://127.0.0.1:", "data:")) else problems.append(request.url)
        ),
    )
    page.problems = problems
    yield page
    context.close()
    assert problems == []


def find_violations(page: Any) -> list[str]:
    """Return what axe-core finds against WCAG 2.2 AA and its best practices."""
    if not AXE.is_file():
        pytest.skip("no axe-core: `make browser` installs it")
    # As an expression: the page's policy allows no script of others
    return page.evaluate(
        f"{AXE.read_text()}; axe.run().then((result) => result.violations.map((each) => "
        '`${each.id}: ${each.nodes.map((node) => node.html.slice(0, 160)).join(" | ")}`))'
    )

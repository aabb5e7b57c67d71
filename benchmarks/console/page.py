"""The page in a real Chromium: time to the first useful picture, bytes, and the service's CPU."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from offbeat.benchmarks.console.service import ServiceProcess
from offbeat.deploy.console.groups import REFRESH_INTERVAL_S

CHROMIUM = ("chromium-headless-shell", "chromium")
UNPACKED = Path(sys.prefix, "chromium", "chromium")
"""Folder of `make browser`."""
VIEWPORT = {"width": 1400, "height": 900}
NO_PAGE = "no page open"


@dataclass(frozen=True, slots=True)
class PageView:
    name: str
    address: str
    """`{group}`: of a kept group."""
    picture: str
    """Selector of the useful part."""


OTHER = (PageView("acts", "#/acts", "textarea"), PageView("mesh", "#/mesh", "svg.mesh"))
"""Views to come from: for all but the acts, and for these."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A view, opened by an empty browser, and by another view's link."""

    name: str
    first_ms: float
    again_ms: float
    bytes: int
    """Transferred at the first opening."""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of the service per second."""

    name: str
    cpu: float


def find_chromium() -> str | None:
    """Return Chromium by `OFFBEAT_CHROMIUM`, PATH, or `make browser`."""
    return os.environ.get("OFFBEAT_CHROMIUM") or next(filter(None, map(shutil.which, (*CHROMIUM, UNPACKED))), None)


def views(run: str) -> list[PageView]:
    return [
        PageView("mesh", f"#/mesh/{run}", "svg.mesh"),
        PageView("curves", f"#/curves/{run}", ".uplot canvas"),
        PageView("groups", f"#/groups/{run}", "tbody tr"),
        PageView("group", f"#/groups/{run}?group={{group}}", "tbody tr a"),
        PageView("trajectory", f"#/trajectory/{run}?group={{group}}&index=0", "article canvas"),
        PageView("acts", f"#/acts/{run}", "textarea"),
    ]


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser, if Playwright and Chromium are installed."""
    try:
        sync_playwright = import_module("playwright.sync_api").sync_playwright
    except ModuleNotFoundError:
        yield None
        return
    path = find_chromium()
    if path is None:
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def measure_pictures(browser: Any, url: str, run: str, group: int) -> list[Picture]:
    return [_measure(browser, f"{url}/ui/", view, group) for view in views(run)]


def _measure(browser: Any, url: str, view: PageView, group: int) -> Picture:
    address, other = url + view.address.format(group=group), OTHER[view.name == "acts"]
    with _page(browser) as page:
        sizes: list[int] = []
        network = page.context.new_cdp_session(page)
        network.send("Network.enable")
        network.on("Network.loadingFinished", lambda event: sizes.append(int(event["encodedDataLength"])))
        first_ms = _open(page, address, view.picture)
        size = sum(sizes)
        _open(page, url + other.address, other.picture)
        return Picture(view.name, first_ms, _open(page, address, view.picture), size)


def _open(page: Any, address: str, picture: str) -> float:
    """Return the milliseconds until the picture is there."""
    began = time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_selector(picture)
    return 1000 * (time.perf_counter() - began)


@contextmanager
def _page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport=VIEWPORT, locale="en-US")
    try:
        yield context.new_page()
    finally:
        context.close()


def measure_cost(
    browser: Any, service: ServiceProcess, run: str, seconds: int, *, add_step: Callable[[], int]
) -> list[Cost]:
    """Measure the service with a step a second, with no view and with each.

    add_step: adds a step and returns one of its groups.
    """
    costs = [Cost(NO_PAGE, _watch(service, seconds, add_step))]
    for view in views(run) if browser is not None else ():
        group = add_step()
        time.sleep(REFRESH_INTERVAL_S)  # until the service reads the new step
        with _page(browser) as page:
            _open(page, f"{service.url}/ui/{view.address.format(group=group)}", view.picture)
            costs.append(Cost(view.name, _watch(service, seconds, add_step)))
    return costs


def _watch(service: ServiceProcess, seconds: int, add_step: Callable[[], int]) -> float:
    began, used = time.monotonic(), service.cpu_s()
    for second in range(1, seconds + 1):
        add_step()
        time.sleep(max(0.0, began + second - time.monotonic()))
    return (service.cpu_s() - used) / (time.monotonic() - began)

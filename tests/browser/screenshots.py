"""Pictures of docs/console.md, from a run's folder: python -m tests.browser.screenshots RUN_FOLDER (needs `make browser`).

The mesh is shown if `offbeat train` is running there.
"""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from offbeat.benchmarks.console.page import VIEWPORT, chromium
from offbeat.deploy.console.server import FolderRuns, create_folder_api
from tests.browser.conftest import serving
from tests.paths import ROOT

IMAGES = ROOT / "docs" / "img"
COLORS = 64
GROUPS = "groups?state=trained&state=consumed&sort=spread&limit=200"
FRAMES_MS = 60_000


def main() -> None:
    folder = Path(sys.argv[1])
    endpoints = folder / "endpoints.json"
    with serving(create_folder_api(FolderRuns(folder))) as url, chromium() as browser:
        assert browser is not None, "`make browser` installs one"
        page = browser.new_context(viewport=VIEWPORT, locale="en-US").new_page()
        run = httpx.get(f"{url}/runs").raise_for_status().json()["runs"][0]["id"]
        if endpoints.is_file():
            live = json.loads(endpoints.read_text())["control_url"]
            show(page, f"{live}/ui/#/mesh/{run}", "main canvas")
            save(page, "mesh")
        take_pictures(page, url, run)


def take_pictures(page: Any, url: str, run: str) -> None:
    show(page, f"{url}/ui/#/curves/{run}", ".uplot canvas")
    save(page, "curves")
    show(page, f"{url}/ui/#/groups/{run}?sort=spread", "tbody tr")
    save(page, "groups")
    groups = httpx.get(f"{url}/runs/{run}/{GROUPS}").raise_for_status().json()["groups"]
    number = next(group["number"] for group in groups if group["recorded"] and len(set(group["rewards"])) > 1)
    show(page, f"{url}/ui/#/trajectory/{run}?group={number}&index=0&beside=1&color=ratio", "article canvas")
    page.get_by_role("button", name="Play again in the env").first.click()
    page.get_by_role("img", name="last frame").first.wait_for(timeout=FRAMES_MS)
    save(page, "trajectory")


def show(page: Any, address: str, picture: str) -> None:
    page.goto(address)
    page.locator(picture).first.wait_for()
    page.wait_for_load_state("load")


def save(page: Any, view: str) -> None:
    path = IMAGES / f"console_{view}.png"
    page.screenshot(path=path)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLORS).save(path, optimize=True)


if __name__ == "__main__":
    main()

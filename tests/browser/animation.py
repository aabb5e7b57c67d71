"""Animation of the page over a run that trains; `make animation-console` runs it (after `make browser`).

The arguments are those of `offbeat train`, with `output_dir`. Equal screenshots in a row are one frame.
"""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from offbeat.benchmarks.console.page import chromium
from tests.browser.screenshots import FRAMES_MS, IMAGES, show
from tests.waiting import wait_until_sync

VIEWPORT = {"width": 1000, "height": 640}
START_S, STEP_S, STOP_S = 600, 120, 60
FRAME_MS, LAST_MS = 700, 2500
QUALITY = 80


def main() -> None:
    arguments = sys.argv[1:]
    folder = next(Path(value) for key, _, value in (text.partition("=") for text in arguments) if key == "output_dir")
    (folder / "endpoints.json").unlink(missing_ok=True)
    training = subprocess.Popen([Path(sys.executable).with_name("offbeat"), "train", *arguments])
    try:
        with chromium() as browser:
            assert browser is not None, "`make browser` installs one"
            film = Film(browser.new_context(viewport=VIEWPORT, locale="en-US").new_page())
            record(film, folder, training)
        film.save(IMAGES / "console.webp")
    finally:
        training.terminate()
        training.wait(STOP_S)


class Film:
    def __init__(self, page: Any) -> None:
        self.page = page
        self._frames: list[Image.Image] = []
        self._durations_ms: list[int] = []

    def add(self, duration_ms: int = FRAME_MS) -> None:
        frame = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        if self._frames and frame.tobytes() == self._frames[-1].tobytes():
            self._durations_ms[-1] = max(self._durations_ms[-1], duration_ms)
            return
        self._frames.append(frame)
        self._durations_ms.append(duration_ms)

    def save(self, path: Path) -> None:
        first, *others = self._frames
        options = {"duration": self._durations_ms, "loop": 0, "quality": QUALITY, "method": 4}
        first.save(path, save_all=True, append_images=others, **options)


def record(film: Film, folder: Path, training: "subprocess.Popen[bytes]") -> None:
    """Open each view in turn, while the run trains."""
    page, endpoints = film.page, folder / "endpoints.json"
    wait_until_sync(lambda: endpoints.is_file() or training.poll() is not None, timeout_s=START_S)
    url = json.loads(endpoints.read_text())["control_url"]
    run = httpx.get(f"{url}/runs").raise_for_status().json()["runs"][0]["id"]

    def step() -> int:
        return httpx.get(f"{url}/runs/{run}").raise_for_status().json()["step"]

    def watch(num_steps: int) -> None:
        """Take a frame after each of some steps."""
        for _ in range(num_steps):
            last = step()
            wait_until_sync(lambda last=last: step() != last, timeout_s=STEP_S)
            film.add()

    show(page, f"{url}/ui/#/mesh/{run}", "svg.mesh")
    film.add()
    wait_until_sync(lambda: step() > 0, timeout_s=START_S)
    watch(8)
    page.get_by_role("link", name="Curves").click()
    page.locator(".uplot canvas").first.wait_for()
    watch(8)
    page.get_by_role("link", name="Groups").click()
    page.locator("tbody tr").first.wait_for()
    film.add(LAST_MS)
    groups = (
        httpx.get(f"{url}/runs/{run}/groups?state=trained&sort=spread&limit=50").raise_for_status().json()["groups"]
    )
    number = next(group["number"] for group in groups if group["recorded"] and len(set(group["rewards"])) > 1)
    show(page, f"{url}/ui/#/trajectory/{run}?group={number}&index=0&color=ratio", "article canvas")
    film.add(LAST_MS)
    page.get_by_role("button", name="Play again in the env").first.click()
    last = page.get_by_role("img", name="last frame").first
    last.wait_for(timeout=FRAMES_MS)
    film.add(LAST_MS)
    last.scroll_into_view_if_needed()
    film.add(LAST_MS)


if __name__ == "__main__":
    main()

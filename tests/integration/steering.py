"""A run of `offbeat train` that is steered over REST while it continues: asked why, watched, changed, paused, resumed."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.waiting import wait_until_sync

OFFBEAT = ROOT / ".venv/bin/offbeat"
WATCHED = "watched.txt"
STILL_S = 1.0
"""Several times what a group of the test's env takes."""


class Steering:
    """The run of one command, by `call(method, path, body)`, which answers None while the service does not."""

    def __init__(self, run_id: str, url: str, call: Callable[..., Any]) -> None:
        self._run = f"/runs/{run_id}"
        self._run_id = run_id
        self._url = url
        self._call = call

    def view(self) -> dict[str, Any]:
        """The run, as soon as the service answers."""
        return self.until(lambda _: True)

    def why(self) -> str:
        return (self._call("GET", f"{self._run}/why") or {}).get("sentence", "")

    def post(self, verb: str) -> None:
        assert self._call("POST", f"{self._run}/{verb}") is not None

    def patch(self, **values: float) -> None:
        assert self._call("PATCH", self._run, values) is not None

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The view for which `holds`."""
        seen: dict[str, Any] = {}

        def look() -> bool:
            seen.update(self._call("GET", self._run) or {})
            return bool(seen) and holds(seen)

        wait_until_sync(look, timeout_s=120, every_s=0.1)
        return seen

    def learning_rates(self) -> dict[int, float]:
        """Optimizer batch, counted from 1 -> the rate that it was trained at."""
        page = self._call("GET", f"{self._run}/metrics?limit=5000")
        trained = [each for each in page["records"] if each["source"] == "learner" and "actor/lr" in each["values"]]
        return {each["step"]: each["values"]["actor/lr"]["value"] for each in trained}

    def offbeat(self, verb: str, *arguments: str) -> str:
        """What `offbeat runs` prints."""
        command = [OFFBEAT, "runs", verb, self._run_id, *arguments, "--url", self._url]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    @contextmanager
    def watched(self, folder: Path) -> Iterator[None]:
        """`offbeat runs watch` until the run is over; what it says goes to `WATCHED`."""
        with (folder / WATCHED).open("w") as seen:
            command = [OFFBEAT, "runs", "watch", self._run_id, "--url", self._url]
            watching = subprocess.Popen(command, stdout=seen, stderr=seen)
            try:
                yield
                assert watching.wait(60) in (0, 1), "0 if it saw the end before the service went with the run"
            finally:
                watching.kill()
                watching.wait()


def steer(run: Steering) -> int:
    """Change, pause and resume the run; returns the step from which on its new settings hold."""
    assert "learner" in run.offbeat("why")
    assert run.why().endswith(".")
    # A step whose groups all are without signal has no rate.
    wait_until_sync(lambda: bool(run.learning_rates()), timeout_s=120)
    run.patch(num_workers=2)
    run.offbeat("set", "learning_rate=5e-4", "max_staleness=2", "temperature=0.8", "num_env_groups=6")
    view = run.until(lambda v: len(v["changes"]) == 2 and v["changes"][1]["from_step"] is not None)
    first = view["changes"][1]["from_step"]
    assert view["settings"] == {
        "num_workers": 2,
        "num_replicas": 1,
        "learning_rate": 5e-4,
        "temperature": 0.8,
        "max_staleness": 2.0,
        "num_env_groups": 6,
    }
    wait_until_sync(lambda: any(step > first for step in run.learning_rates()), timeout_s=120)
    rates = run.learning_rates()
    assert {rate for step, rate in rates.items() if step <= first} == {1e-3}, (first, rates)
    assert {rate for step, rate in rates.items() if step > first} == {5e-4}, (first, rates)

    run.post("pause")
    run.until(lambda v: v["state"] == "paused")
    wait_until_sync(lambda: "is paused" in run.why() and "played to their end" not in run.why())
    paused = run.view()
    time.sleep(STILL_S)
    assert run.view()["counters"]["admitted"] == paused["counters"]["admitted"], "no group begins meanwhile"
    run.post("resume")
    run.until(lambda v: v["step"] >= paused["step"] + 3)
    return first

"""Every act of the page on a live mesh, by a real Chromium: start, settings, pause, resume, reproduce, stop, fork."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from offbeat.deploy.token_file import TOKEN_FILE
from tests.browser.conftest import browser, page
from tests.integration.ray_cluster import RayCluster
from tests.integration.test_deploy import DEPLOY, MY_ENVS
from tests.waiting import wait_until_sync

__all__ = ["browser", "page"]
pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]

RUN = """
exp_name: live
output_dir: runs/live
custom_envs:
  Echo: {env_type: "my_envs:Echo", max_steps: 1, max_tokens_per_step: 2}
train_env_manager: {num_env_groups: 8, group_size: 4}
rollout_batch_size: 16
max_steps: 100000
save_steps: 4
eval_steps: 0
final_val_batch_size: 8
sequence_length: 64
zero_variance: train
actor_infer: {generating_args: {max_new_tokens: 2}}
rollout: {num_workers: 1, cpus_per_worker: 0.5}
"""
ACT_MS = 120_000
"""Checks of a configuration and reproductions run in processes that import for seconds."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    (tmp_path / "fast").touch()
    cluster = RayCluster(tmp_path)
    yield cluster
    cluster.end()


class Person:
    """Somebody at the page, logged in."""

    def __init__(self, page: Any, cluster: RayCluster) -> None:
        self._page = page
        self._cluster = cluster
        page.goto(f"{cluster.url}/ui/")
        page.get_by_label("Token of the control service").fill((cluster.folder / TOKEN_FILE).read_text().strip())
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("navigation").wait_for()

    def open(self, view: str, run: str, text: str) -> None:
        self._page.goto(f"{self._cluster.url}/ui/#/{view}/{run}")
        self._page.get_by_text(text).first.wait_for()

    def act(self, name: str, answer: str) -> None:
        """Press an act, agree, and see its answer."""
        self._page.get_by_role("button", name=name, exact=True).first.click()
        self._page.get_by_role("dialog").get_by_role("button", name=name, exact=True).click()
        self._page.locator("main [role=status]", has_text=answer).wait_for(timeout=ACT_MS)

    def reaches(self, run: str, **fields: Any) -> dict[str, Any]:
        """Return the run's view once it has these fields, or has passed this step."""

        def holds() -> bool:
            view = self._cluster.run(run)
            assert view.get("state") != "failed", view["error"]
            return all(
                view.get(name, -1) >= value if name == "step" else view.get(name) == value
                for name, value in fields.items()
            )

        wait_until_sync(holds, timeout_s=120, every_s=0.2)
        return self._cluster.run(run)


def test_all_acts_on_a_live_run(cluster: RayCluster, page: Any) -> None:
    cluster.start(num_cpus=2)
    cluster.deploy(DEPLOY)
    wait_until_sync(lambda: set(cluster.status().values()) == {"RUNNING"}, timeout_s=120, every_s=0.5)
    person = Person(page, cluster)

    page.get_by_role("link", name="Acts").click()
    page.get_by_label("Configuration, as YAML").fill(RUN)
    person.act("Start", "Started live")
    person.reaches("live", state="running", step=6)

    person.open("acts", "live", "From a checkpoint")
    page.get_by_label("learning rate").fill("0.0005")
    person.act("Change", 'Changed: {"learning_rate":0.0005}')
    wait_until_sync(lambda: cluster.run("live")["changes"][-1]["from_step"] is not None, timeout_s=60)
    see_what_is_live(person, page)

    person.open("acts", "live", "From a checkpoint")
    person.act("Pause", "live is to be paused")
    person.reaches("live", state="paused")
    step = newest_checkpoint(cluster, "live")
    page.get_by_label("Step", exact=True).fill(str(step))
    person.act("Reproduce", f"Reproduction of step {step}")
    assert f"Reproduction of step {step}: equal." in page.locator("main [role=status]").first.inner_text()
    compared = cluster.api.get("/runs/live/reproduce").json()["result"]["compared"]
    assert [each["equal"] for each in compared] == [True]
    person.act("Resume", "live is to be running")
    reached = person.reaches("live", state="running")["step"]
    person.reaches("live", step=reached + 2)
    person.act("Stop", "live is to be stopped")
    person.reaches("live", state="stopped")

    step = newest_checkpoint(cluster, "live")
    page.get_by_label("Step", exact=True).fill(str(step))
    page.get_by_label("Changed keys, as JSON").fill('{"seed": 7}')
    person.act("Fork", f"Started live-fork-{step}")
    person.reaches(f"live-fork-{step}", state="running", step=step + 2)
    config = yaml.safe_load((cluster.folder / f"runs/live-fork-{step}/config.yaml").read_text())
    assert (config["seed"], Path(config["resume_from_checkpoint"]).name) == (7, f"step-{step:06d}")
    person.open("acts", f"live-fork-{step}", "From a checkpoint")
    person.act("Stop now", "is to be killed")
    person.reaches(f"live-fork-{step}", state="stopped")


def newest_checkpoint(cluster: RayCluster, run: str) -> int:
    """Return its step."""
    names = (path.name for path in (cluster.folder / "runs" / run / "checkpoints").glob("step-*"))
    return max(int(name.removeprefix("step-")) for name in names)


def see_what_is_live(person: Person, page: Any) -> None:
    """Look at a running mesh: what waits is lit, curves are marked, a group's tokens are explained."""
    person.open("mesh", "live", "Groups and metrics")
    page.locator(".mesh .lit").first.wait_for()
    page.locator("main ol li", has_text="state running").wait_for()
    person.open("curves", "live", "learner/reward")
    page.locator(".uplot canvas").first.wait_for()
    person.open("groups", "live", "until its checkpoint")
    page.get_by_label("State").select_option("trained")
    page.locator("tbody a").first.click()
    page.get_by_role("link", name="/0").click()
    page.get_by_role("heading", name="Tokens").wait_for()
    page.locator("article canvas").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text("token 0:").wait_for()

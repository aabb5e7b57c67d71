"""Every act of the page on a live mesh, by a real Chromium."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis

from offbeat.deploy.run_folder import newest_checkpoint
from offbeat.deploy.token_file import TOKEN_FILE
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.redis.url_file import read_url_file
from tests.browser.conftest import browser, page
from tests.integration.ray_cluster import RayCluster
from tests.integration.test_deploy import DEPLOY
from tests.waiting import wait_until_sync

__all__ = ["browser", "page"]
pytestmark = [pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(400)]

EDITS = {
    "exp_name": "live",
    "output_dir": "runs/live",
    "train_env_manager": {"num_env_groups": 8, "group_size": 4},
    "warm_start": {"steps": 4},
    "max_steps": 100_000,
    "rollout_batch_size": 16,
    "zero_variance": "train",
    "save_steps": 4,
    "eval_steps": 0,
    "final_val_batch_size": 8,
    "actor_infer": {"strategy_args": {"strategy_name": "hf_infer", "strategy_config": None}},
}
"""What a person changes in the recipe: small batches, an engine that starts quickly, no end."""
ACT_MS = 120_000
"""Checks of a configuration and reproductions run in processes that import for seconds."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RayCluster]:
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

    def open(self, view: str, run: str, seen: Any) -> None:
        """Go to a view and see what the view before it does not have."""
        self._page.goto(f"{self._cluster.url}/ui/#/{view}/{run}")
        seen.first.wait_for()

    def open_acts(self, run: str) -> None:
        self.open("acts", run, self._page.get_by_role("heading", name=f"Run {run}", exact=True))

    def act(self, name: str, answer: str) -> None:
        """Press an act, agree, and see its answer."""
        self._page.get_by_role("button", name=name, exact=True).first.click()
        self._page.get_by_role("dialog").get_by_role("button", name=name, exact=True).click()
        said = self._page.locator("main [role=status], main [role=alert]")
        shown = said.filter(has_text=answer).or_(self._page.get_by_role("alert")).first
        shown.wait_for(timeout=ACT_MS)
        assert answer in shown.inner_text()

    def edit_recipe(self, name: str, edits: Mapping[str, Any]) -> None:
        self._page.get_by_label("From a recipe").select_option(name)
        area = self._page.get_by_label("Configuration, as YAML")
        self._page.wait_for_function("area => area.value !== ''", arg=area.element_handle())
        tree = yaml.safe_load(area.input_value())
        for key, value in edits.items():
            tree[key] = tree[key] | value if isinstance(value, dict) else value
        area.fill(yaml.safe_dump(tree))

    def reaches(self, run: str, **fields: Any) -> dict[str, Any]:
        """Return the run's view once it has these fields; counts may be greater."""

        def holds() -> bool:
            view = self._cluster.run(run)
            assert view.get("state") != "failed", view["error"]
            return all(
                view.get(name, -1) >= value if isinstance(value, int) else view.get(name) == value
                for name, value in fields.items()
            )

        wait_until_sync(holds, timeout_s=120, every_s=0.2)
        return self._cluster.run(run)


def test_all_acts_on_a_live_run(cluster: RayCluster, page: Any) -> None:
    cluster.start(num_cpus=3)
    cluster.deploy(DEPLOY)
    wait_until_sync(lambda: set(cluster.status().values()) == {"RUNNING"}, timeout_s=120, every_s=0.5)
    person = Person(page, cluster)

    page.get_by_role("link", name="Acts").click()
    person.edit_recipe("quickstart", EDITS)
    person.act("Start", "Started live")
    person.reaches("live", state="running", step=6)

    person.open_acts("live")
    page.get_by_label("learning rate").fill("0.0005")
    page.get_by_label("num workers").fill("2")
    person.act("Change", 'Changed: {"num_workers":2,"learning_rate":0.0005}')
    wait_until_sync(lambda: cluster.run("live")["changes"][-1]["from_step"] is not None)
    see_what_is_live(person, page)

    person.open_acts("live")
    person.act("Pause", "live is to be paused")
    person.reaches("live", state="paused")
    step = newest_step(cluster, "live")
    page.get_by_label("Step", exact=True).fill(str(step))
    person.act("Reproduce", f"Reproduction of step {step}: equal.")
    compared = cluster.api.get("/runs/live/reproduce").json()["result"]["compared"]
    assert {each["equal"] for each in compared} == {True}
    damage_complete_groups(cluster, "live")
    person.act("Resume", "live is to be running")
    person.reaches("live", state="running", step=step + 2, quarantined=1)
    page.get_by_role("button", name="Show").click()
    page.locator("li", has_text="member 0").first.wait_for()
    person.act("Stop", "live is to be stopped")
    person.reaches("live", state="stopped")

    step = newest_step(cluster, "live")
    page.get_by_label("Step", exact=True).fill(str(step))
    page.get_by_label("Changed keys, as JSON").fill('{"seed": 7}')
    fork = f"live-fork-{step}"
    person.act("Fork", f"Started {fork}")
    person.reaches(fork, state="running", step=step + 1)
    config = yaml.safe_load((cluster.folder / f"runs/{fork}/config.yaml").read_text())
    assert (config["seed"], Path(config["resume_from_checkpoint"]).name) == (7, f"step-{step:06d}")
    person.open_acts(fork)
    person.act("Stop now", f"{fork} is to be killed")
    person.reaches(fork, state="stopped")


def newest_step(cluster: RayCluster, run: str) -> int:
    """Return the step of the newest checkpoint."""
    checkpoint = newest_checkpoint(cluster.folder / "runs" / run)
    assert checkpoint is not None
    return checkpoint[0]


def damage_complete_groups(cluster: RayCluster, run: str) -> None:
    """Overwrite a member of every complete group, as a defective memory does."""
    keys = BufferKeys(run)
    redis: Any
    with Redis.from_url(read_url_file(cluster.folder / "runs/redis/url")) as redis:
        groups = [entry[b"n"].decode() for _, entry in redis.xrange(keys.stream)]
        assert groups
        for number in groups:
            assert redis.hset(f"{keys.root}:blobs:t:{number}", "0", b"\x00damaged") == 0


def see_what_is_live(person: Person, page: Any) -> None:
    """Look at a running mesh: what waits is lit, curves are marked, a group's tokens are explained."""
    person.open("mesh", "live", page.get_by_text("Groups and metrics"))
    page.locator(".mesh .lit").first.wait_for()
    page.locator("main ol li", has_text="state running").wait_for()
    person.open("curves", "live", page.get_by_text("learner/reward"))
    page.locator(".uplot canvas").first.wait_for()
    person.open("groups", "live", page.get_by_text("until its checkpoint"))
    page.get_by_label("State").select_option("trained")
    # The rows of before are shown until those of the state are read
    row = page.locator("tbody tr").filter(has=page.get_by_role("cell", name="trained", exact=True))
    row.get_by_role("link").first.click()
    page.get_by_role("link", name="/0").click()
    page.get_by_role("heading", name="Tokens").wait_for()
    page.locator("article canvas").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_text("token 0:").wait_for()

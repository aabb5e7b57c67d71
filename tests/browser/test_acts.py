"""Acts ask once, say what they did, and need a token to write; a session is out of a script's reach."""

import json
import re
import time
from collections.abc import Callable
from importlib import import_module
from itertools import compress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis

from offbeat.services.control.rights import Tokens
from offbeat.services.control.run import RunState
from offbeat.services.control.sessions import COOKIE
from offbeat.services.keys import RunKeys
from offbeat.trainer.trackers.metrics_file import METRICS_FILE
from tests.browser.conftest import find_violations
from tests.deploy.console.folders import write_run
from tests.services.control.api_harness import PLAN

pytestmark = pytest.mark.slow


def act(page: Any, name: str) -> str:
    """Press an act, agree, and return what the page then says."""
    page.get_by_role("button", name=name, exact=True).first.click()
    page.get_by_role("dialog").get_by_role("button", name=name, exact=True).click()
    said = page.locator("main .panel [role=status], main .panel [role=alert]").first
    said.wait_for()
    return said.inner_text()


def open_acts(page: Any, url: str, run: str = "lake") -> None:
    page.goto(f"{url}/ui/#/acts/{run}")
    page.get_by_role("heading", name="Start a run").wait_for()


@pytest.mark.parametrize(("name", "wanted"), [("Pause", "paused"), ("Stop", "stopped"), ("Stop now", "killed")])
def test_a_state_is_asked_for(control_url: str, page: Any, name: str, wanted: str) -> None:
    open_acts(page, control_url)
    assert act(page, name) == f"lake is to be {wanted}; it is running."
    assert page.request.get(f"{control_url}/runs/lake").json()["wanted"] == wanted


def test_a_cancelled_act_does_nothing(control_url: str, page: Any) -> None:
    open_acts(page, control_url)
    page.get_by_role("button", name="Stop", exact=True).click()
    assert find_violations(page) == []
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Pause", exact=True).click()
    page.keyboard.press("Escape")
    assert page.request.get(f"{control_url}/runs/lake").json()["wanted"] == "running"


def test_what_the_page_leaves_is_no_longer_acted_on(control_url: str, page: Any) -> None:
    open_acts(page, control_url)
    stop = page.get_by_role("button", name="Stop now", exact=True)
    stop.first.click()
    page.get_by_role("dialog").wait_for()
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/runs?limit=*", hold)
    page.goto(f"{control_url}/ui/#/acts/pond")
    page.locator("main[inert]").wait_for()
    assert page.get_by_role("dialog").count() == 0
    playwright = import_module("playwright.sync_api")  # a module's import would fail where its fixtures skip the tests
    with pytest.raises(playwright.TimeoutError):
        stop.first.click(timeout=500)
    page.get_by_role("heading", name="Run lake", exact=True).wait_for()  # the view that was left
    held.pop().continue_()
    page.get_by_role("heading", name="Run pond", exact=True).wait_for()
    assert act(page, "Pause") == "run 'pond' is finished: it can't pause"
    page.problems.clear()  # Chromium reports the 409 itself
    assert page.request.get(f"{control_url}/runs/lake").json()["wanted"] == "running"


def test_settings_are_changed_and_scaled_and_a_refusal_names_the_key(control_url: str, page: Any) -> None:
    open_acts(page, control_url)
    page.get_by_label("temperature").fill("0.9")
    page.get_by_label("num workers").fill("2")
    assert act(page, "Change") == 'Changed: {"num_workers":2,"temperature":0.9}'
    changes = page.request.get(f"{control_url}/runs/lake").json()["changes"]
    assert changes[-1]["values"] == {"num_workers": 2, "temperature": 0.9}
    page.get_by_label("num workers").fill("99")
    page.get_by_role("button", name="Change", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Change").click()
    page.get_by_role("alert").wait_for()
    assert "rollout.num_workers: there are not enough CPUs" in page.get_by_role("alert").inner_text()
    page.problems.clear()  # Chromium reports the 422 itself


def test_a_setting_that_is_no_number_is_not_sent(control_url: str, page: Any) -> None:
    sent: list[Any] = []
    page.on("request", lambda each: sent.append(each.post_data_json) if each.method == "PATCH" else None)
    open_acts(page, control_url)
    page.get_by_label("learning rate").fill("")
    page.get_by_role("button", name="Change", exact=True).click()
    page.get_by_text("No setting is changed.").wait_for()
    page.get_by_label("learning rate").press_sequentially("1e")
    page.get_by_role("button", name="Change", exact=True).click()
    page.get_by_text("learning rate: not a number").wait_for()
    page.get_by_label("learning rate").fill("")
    page.get_by_label("temperature").fill("0.9")
    act(page, "Change")
    page.get_by_text('Changed: {"temperature":0.9}').wait_for()  # after the earlier answer
    assert sent == [{"temperature": 0.9}]


def test_a_run_is_started_after_its_problems_are_shown_beside_the_lines(control_url: str, page: Any) -> None:
    open_acts(page, control_url)
    page.get_by_label("Configuration, as YAML").fill('{\n "exp_nam": "sea"}')
    page.get_by_role("button", name="Check").click()
    problem = page.get_by_role("button", name="line 2, exp_nam: unknown key Nearest: exp_name")
    problem.wait_for()
    problem.click()
    area = page.get_by_label("Configuration, as YAML")
    assert area.evaluate("a => a.value.slice(a.selectionStart, a.selectionEnd)") == ' "exp_nam": "sea"}'
    page.problems.clear()  # Chromium reports the 422 itself
    area.fill('{"exp_name": "sea"}')
    page.get_by_role("button", name="Check").click()
    page.get_by_text("The configuration is valid.").wait_for()
    act(page, "Start")
    page.get_by_text("Started sea: preparing.").wait_for()
    assert page.request.get(f"{control_url}/runs/sea").status == 200


@pytest.mark.parametrize(
    ("yaml", "path", "line"),
    [
        ("custom_envs:\n  lake:\n    max_steps: 20\nmax_steps: abc\n", "max_steps", 4),
        ("actor_train:\n  device: cpu\nactor_infer:\n  args:\n    name: vllm\n", "actor_train.args.name", 1),
        ("# a: 1\na:\n\n  b:\n    c: 1\n  # c: 2\n  c: 3\n", "a.c", 7),
        ('{\n "a": {\n  "b":1,\n  "c" : 2\n }\n}', "a.c", 4),
        ("envs:\n- name: lake\n  size: 4\nsize: 3\n", "envs.0.size", 1),
        ("a: 1\n", "b", 0),
    ],
)
def test_the_line_of_a_problem_is_within_its_section(
    folder_url: str, page: Any, yaml: str, path: str, line: int
) -> None:
    page.goto(f"{folder_url}/ui/#/acts/lake")
    find = "async ([yaml, path]) => (await import('/ui/js/acts.js')).lineOf(yaml, path)"
    assert page.evaluate(find, [yaml, path]) == line


def test_a_recipe_fills_the_configuration(control_url: str, page: Any) -> None:
    open_acts(page, control_url)
    page.get_by_label("From a recipe").select_option("recipes/dapo")
    area = page.get_by_label("Configuration, as YAML")
    page.wait_for_function("area => area.value.includes('loss_agg_mode: token-mean')", arg=area.element_handle())
    assert "exp_name: dapo\noutput_dir: runs/dapo\n" in area.input_value()


def test_a_configuration_that_was_typed_is_replaced_after_a_question(control_url: str, page: Any) -> None:
    open_acts(page, control_url)
    area, recipe = page.get_by_label("Configuration, as YAML"), page.get_by_label("From a recipe")
    area.fill("exp_name: sea")
    recipe.select_option("recipes/dapo")
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").wait_for(state="hidden")
    assert (area.input_value(), recipe.input_value()) == ("exp_name: sea", "")
    recipe.select_option("recipes/dapo")
    page.get_by_role("dialog").get_by_role("button", name="Replace").click()
    page.wait_for_function("area => area.value.includes('exp_name: dapo')", arg=area.element_handle())
    recipe.select_option("recipes/grpo")  # of the unchanged recipe nothing is lost
    page.wait_for_function("area => area.value.includes('exp_name: grpo')", arg=area.element_handle())


def test_steps_are_reproduced_and_a_fork_without_a_checkpoint_is_refused(control_url: str, page: Any) -> None:
    open_acts(page, control_url)
    page.get_by_label("Step", exact=True).fill("2")
    act(page, "Reproduce")
    page.get_by_text("Reproduction of step 2: equal.").wait_for()
    page.get_by_role("button", name="Fork").click()
    page.get_by_role("dialog").get_by_role("button", name="Fork").click()
    page.get_by_role("alert").wait_for()
    assert "there is no checkpoint of step 2" in page.get_by_role("alert").inner_text()
    page.problems.clear()  # Chromium reports the 404 itself


def test_a_reproduction_is_followed_through_a_refusal(control_url: str, page: Any) -> None:
    refusals = [503, 429]

    def answer(route: Any) -> None:
        if route.request.method == "GET" and refusals:
            route.fulfill(status=refusals.pop(), json={"error": {"code": "busy", "message": "try again"}})
        else:
            route.continue_()

    open_acts(page, control_url)
    page.route("**/reproduce*", answer)
    act(page, "Reproduce")
    page.get_by_text("Reproduction of step 0: equal.").wait_for()
    assert refusals == []
    page.problems.clear()  # Chromium reports the refusals itself


def test_a_running_reproduction_leaves_the_answers_of_other_acts(control_url: str, page: Any) -> None:
    polls = 0

    def answer(route: Any) -> None:
        nonlocal polls
        polls += route.request.method == "GET"
        route.fulfill(json={"step": 0, "state": "running", "error": "", "result": None})

    open_acts(page, control_url)
    page.route("**/reproduce*", answer)
    act(page, "Reproduce")
    page.get_by_text("Reproduction of step 0: running.").wait_for()
    act(page, "Pause")
    said = page.get_by_text("lake is to be paused; it is running.")
    said.wait_for()
    with page.expect_response("**/reproduce"), page.expect_response("**/reproduce"):
        pass
    assert said.is_visible()
    page.get_by_role("link", name="Curves").click()
    page.get_by_role("group", name="Runs").wait_for()
    page.evaluate("fetch('/runs/lake/reproduce').then(answer => answer.status)")  # behind those already sent
    seen = polls
    page.wait_for_timeout(1500)
    assert polls == seen, "a view that was left asks no more"


def test_a_refused_plan_is_said_while_another_runs(control_url: str, page: Any) -> None:
    view = {"state": "running", "error": "", "result": None}
    refusal = {"error": {"code": "conflict", "message": "a plan of run 'lake' is running"}}

    def answer(route: Any) -> None:
        is_asked = route.request.method == "POST"
        route.fulfill(status=409 if is_asked else 200, json=refusal if is_asked else view)

    page.route("**/runs/lake/plan", answer)
    page.goto(f"{control_url}/ui/#/plan/lake")
    page.get_by_role("button", name="Simulate").click()
    page.get_by_text(refusal["error"]["message"]).wait_for()
    with page.expect_response("**/plan"):
        pass
    page.get_by_text("Simulating ...").wait_for()
    assert page.get_by_text(refusal["error"]["message"]).is_visible()
    page.problems.clear()  # Chromium reports the 409 itself


def test_a_plan_is_made_and_shown(control_url: str, page: Any) -> None:
    page.goto(f"{control_url}/ui/#/plan/lake")
    page.get_by_text("No plan was made yet.").wait_for()
    page.get_by_role("button", name="Simulate").click()
    page.get_by_text(PLAN["advice"]).wait_for()
    shown = page.locator("main table").evaluate_all(
        "tables => tables.map(each => [...each.rows].map(row => [...row.cells].map(cell => cell.textContent)))"
    )
    assert shown == [[table["head"], *table["rows"]] for table in PLAN["tables"]]
    assert find_violations(page) == []
    page.reload()
    page.get_by_text(PLAN["advice"]).wait_for()


def test_a_plan_that_fails_says_why(control_url: str, page: Any) -> None:
    page.request.patch(f"{control_url}/runs/lake", data={"num_workers": 2})
    page.goto(f"{control_url}/ui/#/plan/lake")
    page.get_by_role("button", name="Simulate").click()
    page.get_by_text("No plan: the run has 0 steps in its metrics").wait_for()
    assert page.get_by_role("button", name="Simulate").is_enabled()


def test_the_quarantine_is_shown(control_url: str, page: Any) -> None:
    open_acts(page, control_url)
    page.get_by_role("button", name="Show").click()
    page.get_by_text("Empty.").wait_for()


def test_acts_are_accessible_and_the_mesh_lives(control_url: str, page: Any) -> None:
    open_acts(page, control_url)
    assert find_violations(page) == []
    page.get_by_role("link", name="Mesh").click()
    page.locator("main p[role=status]", has_text="run").wait_for()
    page.request.post(f"{control_url}/runs/lake/pause")
    page.get_by_text('wanted {"wanted":"paused"}').wait_for()
    assert find_violations(page) == []


def test_curves_that_are_opened_before_the_first_step_show_it(
    control_url: str, redis_url: str, page: Any, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "sea", "sea")
    metrics = (folder / METRICS_FILE).rename(tmp_path / METRICS_FILE)
    page.request.post(f"{control_url}/runs", data={"exp_name": "sea", "output_dir": str(folder)})
    page.goto(f"{control_url}/ui/#/curves/sea")
    page.get_by_text("There are no metrics yet.").wait_for()
    metrics.rename(folder / METRICS_FILE)
    with Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys("sea").record, "state", RunState.RUNNING)
    page.locator(".uplot canvas").first.wait_for()
    assert page.locator("#metrics option").count() > 0


def test_the_bars_of_groups_in_flight_end_now(control_url: str, page: Any) -> None:
    """The others ended within seconds of their start."""
    now = time.time() + 864_000
    page.clock.set_fixed_time(now)
    page.goto(f"{control_url}/ui/#/groups/lake")
    page.locator("svg.gantt").first.wait_for()
    groups = page.request.get(f"{control_url}/runs/lake/groups").json()["groups"]
    began = [group["trained_at"] or group["submitted_at"] or group["admitted_at"] for group in groups]
    ends_now = [group["ended_at"] is None for group in groups]
    titles = page.locator("svg.gantt title").all_text_contents()
    last_spans_s = [float(title.split()[-2].replace(",", "")) for title in titles]
    assert ends_now.count(True) == 3
    assert titles[0].startswith("played ")
    assert [seconds > 400_000 for seconds in last_spans_s] == ends_now
    for seconds, start in compress(zip(last_spans_s, began, strict=True), ends_now):
        assert seconds == pytest.approx(now - start, abs=1)


def test_bars_of_groups_fill_their_axis_beside_a_browser_whose_clock_is_slow(control_url: str, page: Any) -> None:
    page.clock.set_system_time(time.time() - 864_000)
    page.goto(f"{control_url}/ui/#/groups/lake")
    page.locator("svg.gantt rect").first.wait_for()
    widths = page.locator("svg.gantt rect").evaluate_all("bars => bars.map(bar => Number(bar.getAttribute('width')))")
    assert max(widths) > 20


def test_times_of_another_day_have_their_date(control_url: str, redis_url: str, page: Any) -> None:
    with Redis.from_url(redis_url) as redis:
        redis.xadd(RunKeys("lake").history, {"e": "recovered", "d": json.dumps({"component": "learner"})})
    today = r"^\d+:\d+:\d+ [AP]M learner is ready again$"
    page.goto(f"{control_url}/ui/#/mesh/lake")
    page.locator("li").filter(has_text=re.compile(today)).wait_for()
    page.clock.set_system_time(time.time() + 2 * 86400)
    page.reload()
    page.locator("li").filter(
        has_text=re.compile(r"^\d+/\d+/\d+, \d+:\d+:\d+ [AP]M learner is ready again$")
    ).wait_for()


def test_the_focus_stays_on_a_link_of_a_table_that_is_refreshed(control_url: str, redis_url: str, page: Any) -> None:
    with page.expect_response("**/events?*"):
        page.goto(f"{control_url}/ui/#/groups/lake")
    link = page.get_by_role("link", name="6", exact=True)
    link.focus()
    with page.expect_response("**/groups?*"), Redis.from_url(redis_url) as redis:
        redis.xadd(RunKeys("lake").key("buffer", "life"), {"n": "9", "e": "submitted", "d": "3"})
    page.wait_for_timeout(300)
    assert link.evaluate("element => element === document.activeElement")


def test_curves_are_marked_where_a_component_died_and_recovered(control_url: str, redis_url: str, page: Any) -> None:
    with Redis.from_url(redis_url) as redis:
        for event, detail in (("died", {"why": "exit code 1", "restarts": 1}), ("recovered", {})):
            note = json.dumps({"component": "learner", "step": 2, **detail})
            redis.xadd(RunKeys("lake").history, {"e": event, "d": note})
    page.goto(f"{control_url}/ui/#/curves/lake?names=learner/reward")
    page.get_by_text("step 2: learner died: exit code 1").wait_for()
    page.get_by_text("step 2: learner is ready again").wait_for()
    page.locator(".uplot canvas").wait_for()
    assert find_violations(page) == []
    page.get_by_role("checkbox", name="pond").check()
    page.get_by_text("Differences of the configurations").wait_for()
    page.get_by_text("step 2: learner died").wait_for()
    page.get_by_role("checkbox", name="lake").uncheck()
    page.get_by_text("Differences of the configurations").wait_for(state="detached")
    page.locator(".uplot canvas").wait_for()
    with page.expect_response("**/runs/pond/series?*"):  # of the next refresh
        pass
    page.wait_for_timeout(300)
    assert page.get_by_text("learner died").count() == 0, "a mark of a run whose curves are not shown"


def test_a_browser_logs_in_by_a_cookie_that_scripts_cannot_read(
    page: Any, serve_control: Callable[[Tokens], Any]
) -> None:
    with serve_control(Tokens("operate", "look")) as url:
        page.goto(f"{url}/ui/#/acts/lake")
        page.get_by_label("Token of the control service").fill("wrong")
        page.get_by_role("button", name="Log in").click()
        page.get_by_text("this is no token of the service").wait_for()
        page.problems.clear()  # Chromium reports the 401 itself
        assert find_violations(page) == []
        page.get_by_label("Token of the control service").fill("operate")
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("heading", name="Start a run").wait_for()
        (cookie,) = page.context.cookies()
        assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"]) == (
            f"{COOKIE}_{urlsplit(url).port}",
            True,
            "Strict",
        )
        assert "operate" not in json.dumps(page.context.storage_state())
        assert page.evaluate("document.cookie") == ""
        assert act(page, "Pause") == "lake is to be paused; it is running."
        page.get_by_role("link", name="Mesh").click()
        page.get_by_text('wanted {"wanted":"paused"}').wait_for()
        page.get_by_role("button", name="Log out").click()
        page.get_by_label("Token of the control service").wait_for()
        page.goto("about:blank")  # before the service ends, whose absence the page would report


def test_a_token_for_reading_shows_all_and_changes_nothing(page: Any, serve_control: Callable[[Tokens], Any]) -> None:
    with serve_control(Tokens("operate", "look")) as url:
        page.goto(f"{url}/ui/#/groups/lake")
        page.get_by_label("Token of the control service").fill("look")
        page.keyboard.press("Enter")
        page.get_by_text("1 to 10 of 10").wait_for()
        page.get_by_role("link", name="Acts").click()
        page.get_by_text("Your token is for reading").wait_for()
        page.goto("about:blank")  # as above

"""Each view shows a run's folder in a real Chromium, at any size and in both colour schemes; what agents wrote is text."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from offbeat.deploy.console.server import FolderRuns, create_folder_api
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.control.run import RunState
from offbeat.services.keys import RunKeys
from tests.browser.conftest import HOSTILE, find_violations, serving
from tests.deploy.console.folders import write_run

pytestmark = pytest.mark.slow

MAX_BYTES = 100_000
VIEWS = {
    "mesh": ("#/mesh/lake", "Groups and metrics"),
    "curves": ("#/curves/lake?runs=lake,pond&names=learner/reward", "Differences of the configurations"),
    "groups": ("#/groups/lake", "until its checkpoint"),
    "group": ("#/groups/lake?group=6", "Members"),
    "trajectory": ("#/trajectory/lake?group=6&index=1&beside=2", "Trajectory 6/1"),
    "acts": ("#/acts/lake", "no mesh to act on"),
}


def see(page: Any, url: str, view: str) -> None:
    path, text = VIEWS[view]
    page.goto(f"{url}/ui/{path}")
    page.get_by_text(text).first.wait_for()
    page.wait_for_load_state("networkidle")


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_accessible_in_both_colour_schemes(folder_url: str, page: Any, view: str) -> None:
    see(page, folder_url, view)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert find_violations(page) == [], scheme


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_a_telephone_and_a_wall(folder_url: str, page: Any, view: str) -> None:
    for width in (375, 3840):
        page.set_viewport_size({"width": width, "height": 900})
        see(page, folder_url, view)
        page.reload()
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_groups_are_filtered_and_ordered(folder_url: str, page: Any) -> None:
    see(page, folder_url, "groups")
    rows = page.locator("tbody tr")
    assert rows.count() == 10
    page.get_by_label("State").select_option("dropped")
    page.get_by_text("1 to 2 of 2").wait_for()
    assert [text.split()[0] for text in rows.all_inner_texts()] == ["8", "5"]
    assert "stale" in rows.first.inner_text()
    page.get_by_label("State").select_option("")
    page.get_by_text("1 to 10 of 10").wait_for()
    page.get_by_label("Order").select_option("spread")
    page.get_by_text("1 to 10 of 10").wait_for()
    page.locator("tbody tr:first-child", has_text="counted it in denominators").wait_for()
    page.get_by_role("link", name="6", exact=True).click()
    page.get_by_role("link", name="6/1").click()
    page.get_by_role("heading", name="Trajectory 6/1").wait_for()


def test_the_number_under_the_cursor_is_the_tokens(folder_url: str, page: Any) -> None:
    see(page, folder_url, "trajectory")
    strips = page.locator("article canvas")
    assert strips.count() == 2
    strip = strips.first
    strip.focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    readout = page.locator("article .text").first.inner_text()
    token = page.request.get(f"{folder_url}/runs/lake/trajectories/6/1", headers={"accept": "application/json"}).json()[
        "segments"
    ][0]
    assert f"({token['tokens'][3]}), version {token['versions'][3]}" in readout
    shown = re.search(r"trainer (-?[\d.]+), ratio ([\d.]+), advantage (-?[\d.]+)", readout)
    assert shown is not None
    expected = (token["trainer_logprobs"][3], token["ratio"][3], token["advantages"][3])
    assert [float(each) for each in shown.groups()] == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("column", ["trainer_logprobs", "ratio", "versions", "advantages", "outcome", "mask"])
def test_the_strip_is_coloured_by_each_column(folder_url: str, page: Any, column: str) -> None:
    see(page, folder_url, "trajectory")
    colors = "[...new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)].join()"
    picture = f"(() => {{ const c = document.querySelector('article canvas'); return {colors}; }})()"
    before = page.evaluate(picture)
    page.locator("label", has_text="Colour").locator("select").select_option(column)
    page.locator(f"canvas[aria-label*='coloured by {column}']").first.wait_for()
    assert page.evaluate(picture) != before


LONG_STRIP = """async () => {
  const { strip } = await import('/ui/js/strip.js');
  const column = (kind, value) => new kind(300_000).fill(value);
  const segment = { tokens: column(Int32Array, 7), mask: column(Uint8Array, 1), versions: column(Int32Array, 2),
    logprobs: column(Float32Array, -1), trainer_logprobs: column(Float32Array, -1), ratio: column(Float32Array, 1),
    advantages: column(Float32Array, 1), outcome: column(Uint8Array, 0), images: [] };
  document.body.replaceChildren(strip({ pieces: { 7: 'word' }, outcomes: ['trained'] }, segment, 'logprobs', 600));
}"""


def test_the_strip_of_a_long_episode_is_painted_to_its_end(folder_url: str, page: Any) -> None:
    """300,000 tokens are 600,000 pixels high at this width; a canvas of more than 65,535 stays empty."""
    see(page, folder_url, "acts")
    page.evaluate(LONG_STRIP)
    painted = "c => c.getContext('2d').getImageData(4, c.height - 20, 40, 10).data.some(each => each > 0)"
    canvas = page.locator("canvas")
    assert canvas.evaluate(painted)
    page.locator(".strip").evaluate("scroller => scroller.scrollTop = scroller.scrollHeight")
    page.wait_for_timeout(200)
    assert canvas.evaluate(painted)
    canvas.hover(position={"x": 20, "y": 950})
    page.get_by_text(re.compile(r"token 299,?\d{3}:")).wait_for()
    canvas.focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_text(re.compile(r"token 299,?\d{3}:")).wait_for()


def test_pointing_at_a_row_that_is_cut_does_not_scroll_the_strip(folder_url: str, page: Any) -> None:
    see(page, folder_url, "acts")
    page.evaluate(LONG_STRIP)
    scroller, canvas, top = page.locator(".strip"), page.locator("canvas"), "scroller => scroller.scrollTop"
    scroller.evaluate("scroller => scroller.scrollTop = 5010")
    page.wait_for_function("document.querySelector('.strip').scrollTop === 5010")
    canvas.hover(position={"x": 20, "y": 3})
    page.get_by_text(re.compile(r"token \d")).wait_for()
    assert scroller.evaluate(top) == 5010
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.strip').scrollTop < 5010")


def test_what_an_agent_wrote_is_text(folder_url: str, page: Any) -> None:
    see(page, folder_url, "trajectory")
    assert page.get_by_text(HOSTILE, exact=True).count() > 0
    assert page.title() == "lake – Offbeat"
    assert page.locator("main script, main img[src=x]").count() == 0


def test_the_turns_of_two_seats_show_what_each_has_observed(tmp_path: Path, page: Any) -> None:
    write_run(tmp_path / "lake", seats=True)
    with serving(create_folder_api(FolderRuns(tmp_path))) as url:
        page.goto(f"{url}/ui/#/trajectory/lake?group=6&index=1")
        page.get_by_text("turn 3").wait_for()
        path = f"{url}/runs/lake/trajectories/6/1"
        turns = page.request.get(path, headers={"accept": "application/json"}).json()["turns"]
        shown = page.locator(".turn").evaluate_all("all => all.map(each => each.querySelector('.text').textContent)")
    assert shown[1:] == [turn["observation"] or turn["text"] for turn in turns]


def test_an_episode_is_played_again_beside_its_turns(folder_url: str, page: Any) -> None:
    page.goto(f"{folder_url}/ui/#/trajectory/pond?group=6&index=1")
    page.get_by_role("button", name="Play again in the env").click()
    page.get_by_role("img", name="last frame").wait_for()
    frames = page.locator(".frame img")
    assert frames.count() == 3
    assert frames.evaluate_all("all => all.every(each => each.complete && each.naturalWidth > 0)")
    assert len(set(frames.evaluate_all("all => all.map(each => each.src)"))) > 1
    assert find_violations(page) == []
    page.goto(f"{folder_url}/ui/#/trajectory/lake?group=6&index=1")
    page.get_by_text(HOSTILE).first.wait_for()
    page.get_by_role("button", name="Play again in the env").click()
    page.get_by_text("the run has no env 'tag' to play the episode again").wait_for()
    page.problems.clear()  # Chromium reports the 404 itself


def test_an_episode_that_cannot_be_played_now_can_be_asked_for_again(folder_url: str, page: Any) -> None:
    refusal = {"error": {"code": "too_many_replays", "message": "try again in a minute"}}
    page.route("**/frames", lambda route: route.fulfill(status=429, json=refusal))
    page.goto(f"{folder_url}/ui/#/trajectory/pond?group=6&index=1")
    play = page.get_by_role("button", name="Play again in the env")
    for _ in range(2):
        with page.expect_response("**/frames"):
            play.click()
        page.get_by_text("try again in a minute").wait_for()
    page.problems.clear()  # Chromium reports the 429s itself


def test_curves_of_runs_are_laid_over_each_other(folder_url: str, page: Any) -> None:
    see(page, folder_url, "curves")
    page.locator(".uplot canvas").wait_for()
    assert page.locator(".u-series .u-label").all_inner_texts() == ["step", "lake", "pond"]
    assert "seed\t42\t7" in page.locator("section tbody").last.inner_text()
    page.get_by_label("mean and spread of the runs").check()
    page.get_by_text("lowest").wait_for()
    page.get_by_label("Axis").select_option("trajectories")
    page.locator(".u-label", has_text="trajectories").wait_for()


def test_curves_are_drawn_without_a_comparison_of_their_configurations(folder_url: str, page: Any) -> None:
    refusal = {"error": {"code": "invalid_request", "message": "runs: at most 8 in one call, not 9"}}
    page.route("**/compare?*", lambda route: route.fulfill(status=422, json=refusal))
    see(page, folder_url, "curves")
    page.get_by_text("runs: at most 8 in one call, not 9").wait_for()
    page.locator(".uplot canvas").wait_for()
    page.problems.clear()  # Chromium reports the 422 itself


def test_curves_follow_an_active_run_beside_one_that_has_ended(control_url: str, page: Any) -> None:
    page.goto(f"{control_url}/ui/#/curves/pond?runs=pond,lake")
    page.locator(".uplot canvas").first.wait_for()
    for _ in range(2):  # the first is due to what the stream says at its end
        with page.expect_request(lambda each: "/runs/lake/series" in each.url):
            pass


def test_curves_of_ended_runs_are_read_no_more_and_those_of_a_resumed_one_are(
    control_url: str, redis_url: str, page: Any
) -> None:
    """Beside an ended run; what has not changed is not drawn anew, as it would lose its zoom."""
    with Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys("lake").record, mapping={"state": RunState.FINISHED, "ended_at": 1.0})
        with page.expect_response(lambda each: each.status == 204):  # behind the stream's events
            page.goto(f"{control_url}/ui/#/curves/pond?runs=pond,lake")
        page.locator(".uplot canvas").first.wait_for()
        page.evaluate("document.querySelector('.uplot').id = 'first'")
        asked: list[str] = []
        for _ in range(2):
            for _ in range(2):  # the first reads them once more
                with page.expect_request(lambda each: each.url.endswith("/runs/lake")):
                    pass
            page.on("request", lambda each: asked.append(each.url))
        assert not [url for url in asked if "/series" in url]
        assert page.locator("#first").count() == 1
        redis.hset(RunKeys("lake").record, mapping={"state": RunState.RUNNING, "ended_at": 0.0})
        with page.expect_request(lambda each: "/runs/lake/series" in each.url):
            pass


def test_curves_of_a_run_that_is_deleted_are_left_out_and_the_others_followed(
    control_url: str, redis_url: str, page: Any
) -> None:
    page.goto(f"{control_url}/ui/#/curves/lake?runs=lake,pond")
    page.locator(".uplot canvas").first.wait_for()
    page.locator(".u-series", has_text="pond").first.wait_for()
    httpx.delete(f"{control_url}/runs/pond").raise_for_status()
    page.get_by_role("alert").get_by_text("pond is left out: there is no run 'pond'").wait_for()
    page.wait_for_function(
        "![...document.querySelectorAll('.u-series')].some((each) => each.innerText.includes('pond'))"
    )
    with page.expect_request(lambda each: "/runs/lake/series" in each.url), Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys("lake").progress, "step", 9)
    assert page.get_by_text("pond is left out").count() == 1
    page.problems.clear()  # Chromium reports the 404s itself


def test_an_address_of_no_view_shows_the_mesh(folder_url: str, page: Any) -> None:
    page.goto(f"{folder_url}/ui/#/constructor/lake")
    page.locator("#views [aria-current=page]", has_text="Mesh").wait_for()


def test_an_unknown_metric_has_no_empty_chart(folder_url: str, page: Any) -> None:
    page.goto(f"{folder_url}/ui/#/curves/lake?names=eval/sampled/success")
    page.get_by_text("The runs have no such metric.").wait_for()
    assert page.locator(".chart").count() == 0


def test_curves_read_their_series_once(folder_url: str, page: Any) -> None:
    """The series are requested with the list of runs, not after other answers."""
    paths: list[str] = []
    page.on("request", lambda request: paths.append(request.url.removeprefix(folder_url).partition("?")[0]))
    page.goto(f"{folder_url}/ui/#/curves/lake")
    page.locator(".uplot canvas").first.wait_for()
    page.wait_for_load_state("networkidle")
    reads = [path for path in paths if not path.startswith("/ui/")]
    assert sorted(reads) == ["/runs", "/runs/lake/series", "/session"]


@pytest.mark.parametrize("language", ["en-US@posix", "de-DE"])
def test_curves_are_drawn_in_any_locale(folder_url: str, page: Any, language: str) -> None:
    """Chromium calls the POSIX locale by a name that Intl refuses."""
    page.add_init_script(
        f"Object.defineProperty(Navigator.prototype, 'language', {{ get: () => '{language}', configurable: true }})"
    )
    page.goto(f"{folder_url}/ui/#/curves/lake")
    page.locator(".uplot canvas").first.wait_for()
    assert page.evaluate("navigator.language") == ("de-DE" if language == "de-DE" else "en-US")


def test_the_skip_link_leads_to_the_view_that_is_open(folder_url: str, page: Any) -> None:
    see(page, folder_url, "groups")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.url.endswith("#/groups/lake")
    assert page.locator("tbody tr").count() == 10


def test_the_mesh_names_an_application_of_several_runs_within_its_box(
    control_url: str, redis_url: str, page: Any
) -> None:
    app = "generation-of-many-laboratories"
    seen = Observation(Health.STARTING, f"application {app}, with pond: a replica is being replaced")
    with Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys("lake").key("components"), "generation", json.dumps(asdict(seen)))
    page.goto(f"{control_url}/ui/#/mesh/lake")
    box = page.locator("svg.mesh g", has_text="with pond")
    box.wait_for()
    *lines, last = box.locator("text").all_text_contents()
    assert lines == ["generation", "starting", f"generation-of-many-labora\u2026{app}"], "cut, with the whole as title"
    assert last == "with pond"
    overflow = "texts => texts.some(each => each.getBBox().x + each.getBBox().width > 190)"
    assert not box.locator("text").evaluate_all(overflow)


def test_the_lag_of_a_step_leads_to_its_groups(folder_url: str, page: Any) -> None:
    see(page, folder_url, "mesh")
    page.locator("canvas").wait_for()
    page.locator("canvas").click(position={"x": 40, "y": 20})
    page.get_by_text("1 to 2 of 2").wait_for()
    assert page.get_by_label("Step", exact=True).input_value() == "1"


def test_the_lags_are_read_with_the_keyboard(folder_url: str, page: Any) -> None:
    see(page, folder_url, "mesh")
    canvas = page.locator("canvas")
    canvas.focus()
    for key in ("Enter", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    lags = page.request.get(f"{folder_url}/runs/lake/lags").json()
    page.get_by_text(f"Steps from 2: {lags['counts'][1][1]} groups with lag 1.").wait_for()
    page.keyboard.press("Enter")
    page.get_by_text("1 to 2 of 2").wait_for()
    assert page.get_by_label("Step", exact=True).input_value() == "2"


@pytest.mark.parametrize(
    ("view", "focused", "key"),
    [
        ("groups", "label:has-text('Order') select", "ArrowDown"),
        ("curves", "label:has-text('Axis') select", "ArrowDown"),
        ("groups", "nav a:has-text('Mesh')", "Enter"),
    ],
)
def test_the_focus_stays_while_the_view_is_drawn_again(
    folder_url: str, page: Any, view: str, focused: str, key: str
) -> None:
    see(page, folder_url, view)
    page.locator(focused).focus()
    page.locator(focused).evaluate("element => element.id = 'drawn'")
    page.keyboard.press(key)
    page.locator("#drawn").wait_for(state="detached")
    page.locator(f"{focused}:focus").wait_for()


def test_the_focus_of_a_link_that_is_followed_moves_to_the_view(folder_url: str, page: Any) -> None:
    see(page, folder_url, "groups")
    page.get_by_role("link", name="6", exact=True).focus()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Members").wait_for()
    page.wait_for_function("document.activeElement.id === 'main'")


def test_a_column_of_lags_leads_to_the_step_that_it_begins_at(folder_url: str, page: Any) -> None:
    """36 / 28 * 21 is 27.000000000000004 in floats."""
    lags = {"total": 28, "first": 0, "last": 35, "counts": [[1]] * 28}
    page.route("**/lags?*", lambda route: route.fulfill(json=lags))
    see(page, folder_url, "mesh")
    canvas = page.locator("canvas")
    box = canvas.bounding_box()
    assert box is not None
    position = {"x": (34 + 21 * 14 + 7) * box["width"] / (34 + 28 * 14), "y": 7}
    canvas.hover(position=position)
    page.get_by_text("Steps from 27: 1 groups with lag 0.").wait_for()
    canvas.click(position=position)
    page.get_by_label("Step", exact=True).wait_for()
    assert page.get_by_label("Step", exact=True).input_value() == "27"


def test_a_run_that_is_not_there_is_said_with_those_that_are(folder_url: str, page: Any) -> None:
    page.goto(f"{folder_url}/ui/#/groups/sea")
    page.get_by_role("alert").filter(has_text="there is no run 'sea'").wait_for()
    assert page.locator("#run").input_value() == ""
    assert page.locator("main a").all_inner_texts() == ["pond", "lake"]
    page.get_by_role("link", name="pond").click()
    page.get_by_text("1 to 10 of 10").wait_for()
    page.locator("nav a:has-text('Groups')").focus()
    page.goto(f"{folder_url}/ui/#/groups/river")
    page.get_by_role("alert").filter(has_text="there is no run 'river'").wait_for()
    page.locator("nav a:has-text('Groups'):focus").wait_for()
    page.get_by_role("link", name="pond").click()
    page.get_by_text("1 to 10 of 10").wait_for()
    assert page.url.endswith("#/groups/pond")
    page.problems.clear()  # Chromium reports the 404 itself


def test_a_run_that_cannot_be_read_is_said(folder_url: str, runs: Path, page: Any) -> None:
    broken = runs / "broken"
    broken.mkdir()
    (broken / "config.yaml").write_text("exp_name: [")
    try:
        page.goto(f"{folder_url}/ui/#/mesh/lake")
        page.locator("#run").select_option("broken (unreadable)")
        page.get_by_role("alert").filter(has_text="config.yaml can't be read").wait_for()
        assert find_violations(page) == []
    finally:
        shutil.rmtree(broken)
    page.problems.clear()  # Chromium reports the 404 itself


def test_a_group_that_is_not_there_is_said_in_words(folder_url: str, page: Any) -> None:
    page.goto(f"{folder_url}/ui/#/groups/lake?group=77")
    page.get_by_role("alert").wait_for()
    assert "there is no group 77: 10 were admitted" in page.get_by_role("alert").inner_text()
    page.problems.clear()  # Chromium reports the 404 itself


def test_the_page_costs_little_over_the_wire(folder_url: str, page: Any) -> None:
    sizes: dict[str, int] = {}

    def add(request: Any) -> None:
        if "/ui/" in request.url:
            sizes[request.url] = request.sizes()["responseBodySize"]

    page.on("requestfinished", add)
    see(page, folder_url, "mesh")
    assert len(sizes) >= 12
    assert all(sizes.values())
    assert sum(sizes.values()) < MAX_BYTES

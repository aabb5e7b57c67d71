"""The page has one event stream while it is visible, opens it again where it was, and says while it is lost."""

import json
from typing import Any

import pytest
from redis import Redis

from offbeat.services.control.run import RunState
from offbeat.services.keys import RunKeys

pytestmark = pytest.mark.slow

EVENT = (
    'retry: 1000\nid: 0-0,0-0,1-0\n\nevent: history\ndata: {"event":"state","at":1.0,"detail":{"state":"draining"}}\n\n'
)
"""Its id is that of the block before, as of a stream that begins with its position."""


def refuse(route: Any, status: int, code: str, message: str) -> None:
    route.fulfill(status=status, json={"error": {"code": code, "message": message}})


def show(page: Any, *, hidden: bool) -> None:
    """Hide the page as another tab does, which a headless browser does not."""
    page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{ value: {json.dumps(hidden)}, configurable: true }});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


@pytest.mark.parametrize("view", ["mesh", "curves", "groups", "plan", "acts"])
def test_a_view_opens_one_stream_which_the_frame_follows(
    control_url: str, redis_url: str, page: Any, view: str
) -> None:
    opened: list[str] = []
    page.on("request", lambda each: opened.append(each.url) if "/events?" in each.url else None)
    page.goto(f"{control_url}/ui/#/{view}/lake")
    page.locator("#state", has_text="running").wait_for()
    with Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys("lake").record, "state", RunState.PAUSED)
    page.locator("#state", has_text="paused").wait_for()
    assert len(opened) == 1


def test_hidden_pages_leave_the_connections_to_others_and_miss_no_event(
    control_url: str, redis_url: str, page: Any
) -> None:
    """A browser opens six connections to a host."""
    pages = [page, *(page.context.new_page() for _ in range(6))]
    for each in pages:
        each.goto(f"{control_url}/ui/#/mesh/lake")
        each.get_by_text("created {").wait_for()  # the stream's first event
        if each is not pages[-1]:
            show(each, hidden=True)
    with Redis.from_url(redis_url) as redis:
        redis.xadd(RunKeys("lake").history, {"e": "recovered", "d": json.dumps({"component": "learner"})})
    pages[-1].get_by_text("learner is ready again").wait_for()
    assert page.get_by_text("learner is ready again").count() == 0
    with page.expect_request("**/events?*") as reopened:
        show(page, hidden=False)
    assert reopened.value.headers["last-event-id"]
    page.get_by_text("learner is ready again").wait_for()
    assert page.get_by_text("created {").count() == 1


def test_a_lost_stream_is_said_and_goes_on_after_its_last_event(control_url: str, redis_url: str, page: Any) -> None:
    positions: list[str | None] = []

    def answer(route: Any) -> None:
        positions.append(route.request.headers.get("last-event-id"))
        if len(positions) == 1:
            route.fulfill(status=200, content_type="text/event-stream", body=EVENT)
        elif len(positions) == 2:
            refuse(route, 503, "redis_unavailable", "Redis is restarting")
        elif len(positions) == 3:
            refuse(route, 429, "too_many_watchers", "32 event streams are open")
        else:
            route.continue_()

    page.route("**/events?*", answer)
    page.goto(f"{control_url}/ui/#/mesh/lake")
    for why in ("Redis is restarting", "32 event streams are open"):
        page.get_by_text(f"No new events: {why}").wait_for()
    page.locator("#lost:empty").wait_for(state="attached")
    assert positions == [None, *["0-0,0-0,1-0"] * 3]
    assert page.get_by_text("state draining").count() == 1
    with Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys("lake").record, "state", RunState.PAUSED)
    page.locator("#state", has_text="paused").wait_for()
    assert page.locator("#lost").inner_text() == ""
    page.problems.clear()  # Chromium reports the refusals itself


def test_a_stream_of_a_deleted_run_or_at_its_end_is_not_opened_again(control_url: str, page: Any) -> None:
    statuses: list[int] = []
    page.on("response", lambda each: statuses.append(each.status) if "/events?" in each.url else None)
    with page.expect_response(lambda each: each.status == 204):
        page.goto(f"{control_url}/ui/#/mesh/pond")
    page.route("**/events?*", lambda route: refuse(route, 404, "unknown_run", "there is no run 'lake'"))
    page.wait_for_timeout(1500)
    assert statuses == [200, 204]
    page.goto(f"{control_url}/ui/#/mesh/lake")
    page.get_by_text("No new events: there is no run 'lake'").wait_for()
    page.wait_for_timeout(1500)
    assert statuses == [200, 204, 404]
    page.unroute("**/events?*")
    page.get_by_role("link", name="Acts").click()
    page.locator("#lost:empty").wait_for(state="attached")
    page.problems.clear()  # Chromium reports the 404 itself


def test_a_run_that_is_resumed_after_its_end_is_followed_again(control_url: str, redis_url: str, page: Any) -> None:
    with page.expect_response(lambda each: each.status == 204):
        page.goto(f"{control_url}/ui/#/mesh/pond")
    page.locator("#state", has_text="finished").wait_for()
    with Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys("pond").record, "state", RunState.RUNNING)
    show(page, hidden=True)
    show(page, hidden=False)
    page.locator("#state", has_text="running").wait_for()


def test_a_run_that_has_ended_is_looked_at_soon_after_the_service_is_back(control_url: str, page: Any) -> None:
    with page.expect_response(lambda each: each.status == 204):
        page.goto(f"{control_url}/ui/#/mesh/pond")
    page.route("**/events?*", lambda route: refuse(route, 503, "unreachable", "restarting"))
    show(page, hidden=True)
    show(page, hidden=False)
    page.get_by_text("No new events: restarting").wait_for()
    page.unroute("**/events?*")
    page.locator("#lost:empty").wait_for(state="attached", timeout=25_000)  # not 30 s
    page.problems.clear()  # Chromium reports the 503 itself

"""Groups, trajectories, series and comparisons over REST."""

import msgpack
import numpy as np
import pytest

from offbeat.services.control.console.encoding import MSGPACK_TYPE
from tests.services.control.api_harness import ApiHarness, code

JSON = {"Accept": "application/json"}


async def test_groups_are_listed_by_filter_order_and_page(api: ApiHarness) -> None:
    answer = await api.http.get("/runs/lake/groups", params={"state": ["trained", "consumed"], "limit": 4})
    assert answer.status_code == 200
    page = answer.json()
    assert ([group["number"] for group in page["groups"]], page["total"], page["next"]) == ([7, 6, 4, 3], 6, 4)
    following = (await api.http.get("/runs/lake/groups?state=trained&state=consumed&limit=4&offset=4")).json()
    assert ([group["number"] for group in following["groups"]], following["next"]) == ([1, 0], None)
    odd = (await api.http.get("/runs/lake/groups?sort=spread&min_reward=0.9&limit=1")).json()
    assert odd["groups"][0]["reason"].startswith("its batch counted it in denominators alone")


async def test_lags_are_counted_by_ranges_of_steps(api: ApiHarness) -> None:
    groups = (await api.http.get("/runs/lake/groups?state=trained&state=consumed")).json()["groups"]
    highest = max(group["staleness"] for group in groups)
    assert highest > 0
    for columns, ranges in ((3, [[1], [2], [3]]), (2, [[1, 2], [3]]), (1, [[1, 2, 3]])):
        lags = (await api.http.get(f"/runs/lake/lags?columns={columns}")).json()
        members = [[group["staleness"] for group in groups if group["step"] in steps] for steps in ranges]
        assert lags["counts"] == [[found.count(lag) for lag in range(highest + 1)] for found in members]
        assert (lags["total"], lags["first"], lags["last"]) == (6, 1, 3)
    newest = (await api.http.get("/runs/lake/lags?groups=2")).json()
    assert (newest["total"], newest["first"], newest["last"]) == (2, 3, 3)
    assert sum(newest["counts"][0]) == 2


async def test_one_group_is_shown_with_its_members(api: ApiHarness) -> None:
    group = (await api.http.get("/runs/lake/groups/6")).json()
    assert (group["state"], group["step"], group["recorded"]) == ("consumed", 3, True)
    assert [member["reward"] for member in group["members"]] == [0.0, 1.0, 0.5]


async def test_a_trajectory_in_binary_holds_what_its_json_holds(api: ApiHarness) -> None:
    binary = await api.http.get("/runs/lake/trajectories/6/1")
    plain = await api.http.get("/runs/lake/trajectories/6/1", headers=JSON)
    assert (binary.headers["content-type"], plain.headers["content-type"]) == (MSGPACK_TYPE, "application/json")
    packed, tree = msgpack.unpackb(binary.content), plain.json()
    (columns,), (segment,) = packed.pop("segments"), tree.pop("segments")
    assert packed == tree
    assert np.frombuffer(columns["tokens"], dtype="<i4").tolist() == segment["tokens"]
    assert list(columns["mask"]) == segment["mask"]
    assert np.frombuffer(columns["versions"], dtype="<i4").tolist() == segment["versions"]
    for name in ("logprobs", "trainer_logprobs", "ratio", "advantages"):
        expected = [np.nan if value is None else value for value in segment[name]]
        np.testing.assert_allclose(np.frombuffer(columns[name], dtype="<f4"), expected, rtol=1e-6)


async def test_series_come_by_any_axis(api: ApiHarness) -> None:
    names = "learner/reward,learner/actor/ratio"
    series = (await api.http.get("/runs/lake/series", params={"names": names, "axis": "trajectories"})).json()
    assert series["series"]["learner/reward"] == {"x": [5, 10, 15], "values": [0.5, 1.0, 1.5], "total": 3}
    later = (await api.http.get("/runs/lake/series", params={"names": names, "since": 3})).json()
    assert [len(each["x"]) for each in later["series"].values()] == [1, 1]
    assert later["last"]["learner/reward"] == 1.5


async def test_runs_are_compared_by_what_differs(api: ApiHarness) -> None:
    compared = (await api.http.get("/compare?runs=lake,pond")).json()
    assert [run["id"] for run in compared["runs"]] == ["lake", "pond"]
    assert compared["runs"][1]["metrics"]["learner/reward"] == 1.5
    assert {"seed", "exp_name"} <= set(compared["differences"]) <= {"seed", "exp_name", "output_dir"}
    assert compared["differences"]["seed"] == [42, 7]


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/runs/nobody/groups", 404, "unknown_run"),
        ("/runs/lake/groups/77", 404, "unknown_group"),
        ("/runs/lake/trajectories/9/0", 404, "not_recorded"),
        ("/runs/lake/trajectories/6/9", 404, "not_recorded"),
        ("/runs/lake/groups?sort=size", 422, "invalid_request"),
        ("/runs/lake/groups?min_reward=nan", 422, "invalid_request"),
        ("/runs/lake/series?since=inf", 422, "invalid_request"),
        ("/compare?runs=,", 422, "invalid_request"),
        ("/compare?runs=a,b,c,d,e,f,g,h,i", 422, "invalid_request"),
        ("/compare?runs=lake,nobody", 404, "unknown_run"),
    ],
)
async def test_what_is_not_there_is_refused(api: ApiHarness, path: str, status: int, error: str) -> None:
    answer = await api.http.get(path)
    assert (answer.status_code, code(answer)) == (status, error)


async def test_a_run_whose_folder_is_elsewhere_is_refused_in_words(api: ApiHarness) -> None:
    await api.start("gone", output_dir="/nowhere/gone")
    groups = (await api.http.get("/runs/gone/groups")).json()
    assert groups == {"groups": [], "total": 0, "next": None}
    compared = await api.http.get("/compare?runs=gone")
    assert (compared.status_code, code(compared)) == (404, "not_recorded")
    assert "/nowhere/gone/config.yaml" in compared.json()["error"]["message"]

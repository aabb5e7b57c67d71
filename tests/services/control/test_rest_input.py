"""Whatever is sent to the API, with the project's own validation behind it, is answered by a success or a 4xx in words."""

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from offbeat.deploy.cluster.run_factory import MachineSize, MeshRunFactory
from offbeat.services.control.api import create_api
from offbeat.services.control.rights import Rights, Tokens
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore
from tests.paths import QUICKSTART

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text().replace("4.0e-3", "0.004"))
CONFIG["actor_train"]["training_args"]["learning_rate"] = 8e-4
YAML, JSON = {"Content-Type": "application/yaml"}, {"Content-Type": "application/json"}
MOST_CPU_S = 5.0
"""For a megabyte; it was half a minute where the time grew with the square of the size."""
FEW = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])

characters = st.characters(codec=None)  # lone surrogates too
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(characters, max_size=12)
trees = st.recursive(
    plain,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(characters, max_size=8), each, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def http(redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TestClient]:
    monkeypatch.chdir(tmp_path)
    redis = Redis.from_url(redis_url)
    service = ControlService(RunStore(redis), MeshRunFactory(redis, redis_url, tmp_path), wake=lambda: None)
    with TestClient(create_api(service), base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client
        client.portal.call(redis.aclose)  # type: ignore[union-attr]


def paths(tree: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of every key."""
    for key, value in tree.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def in_words(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["code"]
        assert error["message"]
        assert "Traceback" not in answer.text


@FEW
@given(path=st.sampled_from(sorted(paths(CONFIG))), value=trees)
def test_a_configuration_with_any_value_in_any_place(http: TestClient, path: tuple[str, ...], value: object):
    tree = copy.deepcopy(CONFIG)
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    in_words(http.post("/runs?dry_run=true", content=json.dumps(tree), headers=JSON))


@FEW
@given(path=st.sampled_from(sorted(paths(CONFIG))), name=st.text(characters, max_size=12))
def test_a_configuration_with_any_key_renamed(http: TestClient, path: tuple[str, ...], name: str):
    tree = copy.deepcopy(CONFIG)
    node = tree
    for key in path[:-1]:
        node = node[key]
    node[name] = node.pop(path[-1])
    in_words(http.post("/runs?dry_run=true", content=json.dumps(tree), headers=JSON))


@FEW
@given(
    body=st.binary(max_size=60) | trees.map(lambda tree: json.dumps(tree).encode()),
    headers=st.sampled_from([YAML, JSON]),
)
def test_any_body(http: TestClient, body: bytes, headers: dict[str, str]):
    in_words(http.post("/runs?dry_run=true", content=body, headers=headers))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
        + "".join(
            f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n"
            for before, name in zip("bcdefgh", "cdefghi", strict=True)
        ),
        "[" * 5000,
        "a: " * 3000,
        "- " * 5000 + "x",
        "exp_name: !!python/object/apply:os.system ['true']",
        "exp_name: ${oc.env:HOME}",
        "exp_name: '???'",
        "? {a: 1}\n: 2",
        "a: 2026-99-99",
        "\x00",
        "%YAML 9.9\n---\na: 1",
        "a: 1\n---\nb: 2",
        "a: &a [*a]",
        "a: &a {b: *a}",
        "a: &a 'x'\nb: [" + "*a, " * 200_000 + "]",
        f"a: &a '{'x' * 90_000}'\nb: [{'*a, ' * 500}]",
        f"seed: {'9' * 5000}",
        f"seed: 0x{'f' * 5000}",
        f"max_staleness: {'1:' * 3000}1.5",
        "seed: 0b_",
        "seed: !!int abc",
        "'" * 900_000,
        f"{'x' * 900_000}: 1",
        '"' + '\\"' * 440_000 + '": 1',
        "\n".join(f"key{i}: 1" for i in range(60_000)),
        "actor_train: {" + ", ".join(f"key{i}: 1" for i in range(60_000)) + "}",
    ],
    ids=[
        "bomb",
        "brackets",
        "colons",
        "dashes",
        "object",
        "environment",
        "missing",
        "key",
        "date",
        "nul",
        "version",
        "two",
        "recursive list",
        "recursive mapping",
        "aliases",
        "long aliases",
        "digits",
        "hexadecimal digits",
        "sexagesimal digits",
        "no digits",
        "tag",
        "quotes",
        "long key",
        "escaped quotes",
        "keys",
        "nested keys",
    ],
)
def test_yaml_that_is_meant_to_harm(http: TestClient, text: str):
    started = time.process_time()
    answer = http.post("/runs?dry_run=true", content=text.encode(), headers=YAML)
    assert time.process_time() - started < MOST_CPU_S
    assert answer.status_code in (400, 413, 422), answer.text
    in_words(answer)
    assert len(answer.content) < 200_000


@pytest.mark.parametrize(
    "text",
    [
        '{"seed": ' + "9" * 5000 + "}",
        '{"custom_envs": ' + '{"a": ' * 900 + "1" + "}" * 901,
        '{"custom_envs": ' + "[" * 450_000,
        json.dumps({"'" * 900_000: 1}),
        json.dumps({f"key{i}": 1 for i in range(60_000)}),
        json.dumps({**CONFIG, "train_env_manager": {"tags": [f"t{i}" for i in range(60_000)]}}),
        json.dumps({**CONFIG, "exp_name": "'" * 900_000}),
    ],
    ids=["digits", "nested", "open", "quotes", "keys", "tags", "long value"],
)
def test_json_that_is_meant_to_harm(http: TestClient, text: str):
    started = time.process_time()
    answer = http.post("/runs?dry_run=true", content=text, headers=JSON)
    assert time.process_time() - started < MOST_CPU_S
    assert answer.status_code in (400, 422), answer.text
    in_words(answer)
    assert len(answer.content) < 200_000


def test_an_integer_of_many_digits_is_refused_in_words(http: TestClient):
    refused = http.post("/runs", content='{"seed": ' + "9" * 5000 + "}", headers=JSON)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the body can't be read: an integer has at most 400 digits"


def test_a_change_of_many_unknown_keys_is_refused_soon(http: TestClient):
    assert http.post("/runs", json=CONFIG).status_code == 201
    started = time.process_time()
    answer = http.patch("/runs/quickstart", json={f"key{i}": 1 for i in range(60_000)})
    assert time.process_time() - started < MOST_CPU_S
    assert (answer.status_code, len(answer.json()["error"]["problems"])) == (422, 100)


@pytest.mark.parametrize(
    ("tree", "path", "key"),
    [
        ({"custom_envs": {"A": {"env_type": "pathlib:Path"}}}, "custom_envs.A.env_type", "allow_modules"),
        ({"output_dir": "/tmp/elsewhere"}, "output_dir", "output_roots"),
    ],
)
def test_a_configuration_beyond_the_rights_is_refused_with_the_key_to_change(
    redis_url: str, tmp_path: Path, tree: dict[str, Any], path: str, key: str
):
    redis = Redis.from_url(redis_url)
    service = ControlService(RunStore(redis), MeshRunFactory(redis, redis_url, tmp_path), wake=lambda: None)
    tokens = Tokens("secret", rights=Rights(("offbeat.*",), (str(tmp_path),)))
    headers = {"Authorization": "Bearer secret"}
    with TestClient(create_api(service, tokens=tokens), base_url="http://127.0.0.1", headers=headers) as client:
        refused = client.post("/runs?dry_run=true", json={**CONFIG, **tree})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
        (problem,) = refused.json()["error"]["problems"]
        assert problem["path"] == path
        assert key in problem["message"]
        assert client.post("/runs?dry_run=true", json=CONFIG).status_code == 200
        client.portal.call(redis.aclose)  # type: ignore[union-attr]


class EightCores(MeshRunFactory):
    async def _size(self) -> MachineSize:
        return MachineSize(cpus=8.0)


def test_a_change_is_validated_with_those_before_it(redis_url: str, tmp_path: Path):
    """14 workers take 7 cores, and each engine one."""
    redis = Redis.from_url(redis_url)
    service = ControlService(RunStore(redis), EightCores(redis, redis_url, tmp_path), wake=lambda: None)
    with TestClient(create_api(service), base_url="http://127.0.0.1") as client:
        assert client.post("/runs", json=CONFIG).status_code == 201
        change = f"/runs/{CONFIG['exp_name']}"
        assert client.patch(change, json={"num_workers": 14}).status_code == 200
        refused = client.patch(change, json={"num_replicas": 7})
        assert refused.status_code == 422
        assert "need 14 CPUs" in str(refused.json()["error"]["problems"])
        assert client.patch(change, json={"num_workers": 2}).status_code == 200
        assert client.patch(change, json={"num_replicas": 5}).status_code == 200
        client.portal.call(redis.aclose)  # type: ignore[union-attr]


def test_a_misspelt_key_deep_inside_is_named_with_the_nearest(http: TestClient):
    tree = copy.deepcopy(CONFIG)
    tree["actor_train"]["training_args"]["learning_rat"] = 0.1
    refused = http.post("/runs?dry_run=true", json=tree)
    assert refused.status_code == 422
    (problem,) = refused.json()["error"]["problems"]
    assert problem["path"] == "actor_train.training_args.learning_rat"
    assert problem["suggestion"] == "actor_train.training_args.learning_rate"


@FEW
@given(
    body=st.dictionaries(
        st.sampled_from(["num_workers", "learning_rate", "temperature", "x"]) | st.text(characters), trees, max_size=3
    )
)
def test_any_change_of_settings(http: TestClient, body: dict[str, Any]):
    if http.get("/runs/quickstart").status_code == 404:
        assert http.post("/runs", json=CONFIG).status_code == 201
    in_words(http.patch("/runs/quickstart", content=json.dumps(body), headers=JSON))


def test_more_workers_than_cpus_are_refused_with_the_number_that_fits(http: TestClient):
    assert http.post("/runs", json=CONFIG).status_code == 201
    refused = http.patch("/runs/quickstart", json={"num_workers": 4000})
    assert refused.status_code == 422
    (problem,) = refused.json()["error"]["problems"]
    assert problem["path"] == "rollout.num_workers"
    assert "take rollout.num_workers <=" in problem["message"]
    assert http.patch("/runs/quickstart", json={"max_staleness": 3.0}).status_code == 200


@FEW
@given(query=st.text(characters, max_size=30), header=st.binary(max_size=30))
def test_any_query_and_header(http: TestClient, query: str, header: bytes):
    for path in ("/runs", "/runs/quickstart", "/runs/quickstart/events", "/runs/quickstart/metrics"):
        for name in ("after", "limit", "state", "name", "kind"):
            in_words(http.get(path, params={name: query.encode("utf-8", "replace").decode()}))
        clean = header.replace(b"\r", b"").replace(b"\n", b"").replace(b"\x00", b"")
        for name in ("Last-Event-ID", "Authorization", "Host", "Origin"):
            in_words(http.get(path, headers={name: clean.decode("latin-1").encode("latin-1")}))  # type: ignore[dict-item]

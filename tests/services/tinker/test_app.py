"""Routes over a real Redis: retries change nothing, keys are apart, and no body is answered with a 5xx."""

import json
import re
from datetime import datetime
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from offbeat.services.redis.connection import connect_async
from offbeat.services.tinker.app import PROTOBUF, router
from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.expiry import SessionExpiry
from offbeat.services.tinker.log import Write
from offbeat.services.tinker.records import (
    AdapterVersion,
    AppliedCommand,
    CheckpointRecord,
    OptimStep,
    RefusedCommand,
    Result,
    SamplerRecord,
    StepMetrics,
    decode_command,
)
from tests.services.tinker.api_server import KEY, OTHER_KEY, Server, make_service
from tests.services.tinker.test_sampling import body as sample_body
from tests.services.tinker.test_wire import request as forward_backward_body
from tests.waiting import wait_until

NUM_HOSTILE = 2000
ANSWERED = {200, 400, 401, 404, 405, 408, 410, 413, 422, 429}


async def test_a_retried_call_gets_the_same_answer_and_adds_no_command(server: Server) -> None:
    session, model = await server.create_model()
    seed = server.log.model(model).lora.seed
    body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 2}}
    assert (await server.post("/create_model", body))["model_id"] == model
    assert server.log.model(model).lora.seed == seed
    step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.5}}
    answers = [await server.post("/optim_step", step) for _ in range(2)]
    assert answers[0] == answers[1] == {"request_id": f"{model}:1", "model_id": model}
    assert server.log.logged(model) == [0, 1]
    again = await server.post("/save_weights", {"model_id": model, "seq_id": 1, "path": "other"})
    data = server.log.command(model, 1)
    assert data is not None
    assert (again["request_id"], type(decode_command(data)).__name__) == (f"{model}:1", "OptimStep")


async def test_a_result_is_fetched_as_often_as_it_is_asked_for(server: Server) -> None:
    _, model = await server.create_model()
    server.log.commit(model, server.log.model(model).owner, 0, Result.of_json({"model_id": model}))
    for _ in range(2):
        assert await server.post("/retrieve_future", {"request_id": f"{model}:0"}) == {"model_id": model}
    for unknown in (f"{model}:x", "nothing", "nothing:1", f"{model}:sample:0"):
        await server.post("/retrieve_future", {"request_id": unknown}, 404)
    await server.post("/retrieve_future", {"request_id": f"{model}:0"}, 404, OTHER_KEY)


async def test_an_unknown_sample_is_to_be_sent_again(server: Server) -> None:
    session, _ = await server.create_model()
    sampler = await server.post(
        "/create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    )
    await server.post("/retrieve_future", {"request_id": f"{sampler['sampling_session_id']}:5"}, 410)
    await server.post("/retrieve_future", {"request_id": f"{sampler['sampling_session_id']}:5"}, 404, OTHER_KEY)


async def test_a_sample_in_json_has_the_scores_of_its_prompt(server: Server) -> None:
    session, _ = await server.create_model()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    sampler = (await server.post("/create_sampling_session", body))["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    wanted = sample_body(sampling_session_id=sampler, prompt=prompt, prompt_logprobs=True, topk_prompt_logprobs=2)
    asked = await server.post("/asample", wanted.model_dump(mode="json"))
    answer = await server.post("/retrieve_future", {"request_id": asked["request_id"]})
    assert len(answer["sequences"]) == 1
    assert answer["prompt_logprobs"] == [None, -2.0, -3.0]
    assert answer["topk_prompt_logprobs"] == [None, [[2, 3], [0.0, -1.0]], [[3, 4], [0.0, -1.0]]]


async def test_deleted_weights_are_not_replaced_by_the_base_model(server: Server) -> None:
    session, model = await server.create_model()
    store, sampler = server.service.store, f"{session}:sample:0"
    record = SamplerRecord(owner=server.log.model(model).owner, inflight_model_id=model)
    await store.put_once(store.keys.samplers, sampler, record)  # whose weights went with the model
    body = sample_body(sampling_session_id=sampler).model_dump(mode="json")
    asked = await server.post("/asample", body)
    answer = await server.post("/retrieve_future", {"request_id": asked["request_id"]})
    assert "were deleted" in answer["error"]


async def test_a_finished_session_beats_no_more(server: Server) -> None:
    session, _ = await server.create_model()
    await server.post("/session_heartbeat", {"session_id": session})
    await server.post(f"/sessions/{session}/finish", {}, 404, OTHER_KEY)
    await server.post(f"/sessions/{session}/finish", {"reason": {"type": "success"}})
    await server.post("/session_heartbeat", {"session_id": session}, 410)


async def test_an_idle_session_ends_and_its_models_close_when_their_commands_are_applied(server: Server) -> None:
    """A command whose predecessor never came does not keep a model open."""
    session, model = await server.create_model()
    _, other = await server.create_model()
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "base"}
    await server.post("/create_sampling_session", sampler)
    late = {"model_id": model, "seq_id": 5, "adam_params": {}}
    await server.post("/optim_step", late)
    expiry = SessionExpiry(server.service.records, 1000.0)
    for now in (0.0, 999.0):
        await expiry.end_idle(now)
    assert server.log.ended() == {}
    await expiry.end_idle(1000.0)
    await server.post("/session_heartbeat", {"session_id": session}, 410)
    assert model in server.log.ended()[session]
    assert not server.log.close(model), "its first command is not applied"
    owner = server.log.model(model).owner
    server.log.commit(model, owner, 0, Result.of_json({"model_id": model}))
    assert server.log.close(model)
    assert server.log.logged(model) == []
    server.log.forget_session(session)
    assert [each for each in server.log.ended() if each == session] == []
    assert "ended" in (await server.post("/optim_step", {**late, "seq_id": 1}, 410))["detail"]
    assert "ended" in (await server.post("/create_sampling_session", sampler, 410))["detail"]
    assert await server.post("/retrieve_future", {"request_id": f"{model}:0"}) == {"model_id": model}
    assert server.log.logged(other) == [0]


async def test_a_key_has_a_limited_number_of_models(server: Server) -> None:
    session, _ = await server.create_model()
    body = {"session_id": session, "model_seq_id": 1, "base_model": "base", "lora_config": {"rank": 2}}
    for number in (1, 2):
        await server.post("/create_model", {**body, "model_seq_id": number})
    refused = await server.post("/create_model", {**body, "model_seq_id": 3}, 400)
    assert "tinker.max_models_per_key" in refused["detail"]
    await server.post("/create_model", {**body, "model_seq_id": 2})
    await server.post(f"/sessions/{session}/finish", {})
    for model in server.log.ended()[session]:
        server.log.commit(model, server.log.model(model).owner, 0, Result.of_json({}))
        assert server.log.close(model)
    await server.create_model()


async def test_checkpoints_of_a_key_take_a_limited_space(server: Server) -> None:
    """A refused command keeps its place; another key is not concerned."""
    _, model = await server.create_model()
    owner, lora = server.log.model(model).owner, server.log.model(model).lora
    adapter = AdapterVersion(folder="/a", version=0)
    saved = CheckpointRecord(
        model_id=model, kind="training", created_at=0.0, adapter=adapter, lora=lora, size_bytes=2 << 30
    )
    path = f"tinker://{model}/weights/a"
    server.log.commit(model, owner, 0, Result.of_json({}), server.log.checkpoint_writes(owner, path, saved))
    for seq_id, route in enumerate(("/save_weights", "/save_weights_for_sampler"), 1):
        await server.post(route, {"model_id": model, "seq_id": seq_id, "path": "b"})
        data = server.log.command(model, seq_id)
        assert data is not None
        command = decode_command(data)
        assert isinstance(command, RefusedCommand)
        assert "2 GiB (tinker.max_saved_gib)" in command.error
    deletion = f"/training_runs/{model}/checkpoints/weights/a"
    assert (await server.client.delete(deletion, headers=KEY)).status_code == 200
    await server.post("/save_weights", {"model_id": model, "seq_id": 3, "path": "b"})
    data = server.log.command(model, 3)
    assert data is not None
    assert not isinstance(decode_command(data), RefusedCommand)


async def test_limits_count_what_an_earlier_build_has_stored(server: Server) -> None:
    """Builds before the limits wrote no list of a key's open models, and none of its checkpoints' sizes."""
    first_session, ended = await server.create_model()
    _, model = await server.create_model()
    await server.post(f"/sessions/{first_session}/finish", {})
    owner, lora, keys = server.log.model(model).owner, server.log.model(model).lora, server.log.keys
    server.log.commit(ended, owner, 0, Result.of_json({}))
    assert server.log.close(ended)
    adapter = AdapterVersion(folder="/a", version=0)
    saved = CheckpointRecord(
        model_id=ended, kind="training", created_at=0.0, adapter=adapter, lora=lora, size_bytes=2 << 30
    )
    path = f"tinker://{ended}/weights/a"
    for each in server.log.checkpoint_writes(owner, path, saved):
        server.redis.hset(each.key, each.field, each.value)
    server.redis.delete(keys.open_models(owner), keys.checkpoint_sizes(owner))
    for _ in range(2):
        server.log.take_over()
        assert await server.service.store.open_models(owner) == {model}
        assert await server.service.store.saved_bytes(owner) == 2 << 30
    await server.service.store.change_checkpoint(owner, path, lambda _: None)
    server.log.take_over()
    assert await server.service.store.saved_bytes(owner) == 0


async def test_a_service_whose_background_task_failed_is_not_healthy(redis_url: str) -> None:
    """A heartbeat that is no time ends the expiry of sessions."""
    redis = connect_async(redis_url)
    service = make_service(redis, TinkerConfig(session_timeout_s=0.1))

    async def has_failed() -> bool:
        try:
            await service.check()
        except ValueError as error:
            return "spoiled" in str(error)
        return False

    async with service.background():
        await service.check()
        await redis.hset(service.store.keys.heartbeats, "s", "spoiled")
        await wait_until(has_failed)
    await redis.aclose()


async def test_why_says_what_a_model_waits_for(server: Server) -> None:
    session, model = await server.create_model()
    _, other = await server.create_model()
    owner = server.log.model(model).owner

    async def why() -> str:
        answer = await server.client.get(f"/training_runs/{model}/why", headers=KEY)
        return answer.json()["waits_for"]

    assert "not taken up" in await why()
    server.log.take_up(other, 0)
    assert "a command of another model" in await why()
    server.log.commit(other, owner, 0, Result.of_json({}))
    server.log.take_up(model, 0)
    assert re.search(r"it has been applying command 0 for \d{1,2}\.\d", await why())
    server.log.report("another", 3, {"third": 4})
    assert re.search(r"it has been applying commands of 2 other models for \d{1,2}\.\d", await why())
    server.log.report(other, 0, {model: 0})
    assert (await why()).endswith("s, in a pass with those of 1 other model")
    server.log.commit(model, owner, 0, Result.of_json({}))
    assert (await why()).startswith("its client: every command")
    await server.post("/optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
    assert await why() == "its client: command 1 has not come; later ones are held"
    await server.post(f"/sessions/{session}/finish", {})
    assert server.log.close(model)
    assert "ended" in await why()
    assert (await server.client.get(f"/training_runs/{model}/why", headers=OTHER_KEY)).status_code == 404


async def test_optimizer_steps_are_listed_in_order(server: Server) -> None:
    _, model = await server.create_model()
    owner, key = server.log.model(model).owner, server.log.keys.metrics(model)
    step = StepMetrics(at=1.0, version=1, loss=2.0, num_sequences=3, num_tokens=4, grad_norm=5.0, learning_rate=6.0)
    for seq_id in range(12):
        await server.service.store.submit(model, owner, seq_id, OptimStep())
        server.log.commit(model, owner, seq_id, Result.of_json({}), [Write.of(key, str(seq_id), step)])
    path = f"/training_runs/{model}/metrics"
    steps = (await server.client.get(path, headers=KEY)).json()["steps"]
    assert [each["seq_id"] for each in steps] == list(range(12))
    assert steps[0] == {"seq_id": 0, **msgspec.structs.asdict(step)}
    assert (await server.client.get(path, headers=OTHER_KEY)).status_code == 404


async def test_a_training_run_names_the_time_of_its_last_command(server: Server) -> None:
    _, model = await server.create_model()
    owner, key = server.log.model(model).owner, server.log.keys.applied_commands(model)
    times = []
    for seq_id, at in enumerate((5e9, 6e9)):
        entry = AppliedCommand(kind="optim_step", at=at, version=seq_id)
        await server.service.store.submit(model, owner, seq_id, OptimStep())
        server.log.commit(model, owner, seq_id, Result.of_json({}), [Write.of(key, str(seq_id), entry)])
        listed = (await server.client.get("/training_runs", headers=KEY)).json()["training_runs"]
        shown = (await server.client.get(f"/training_runs/{model}", headers=KEY)).json()
        assert listed == [shown]
        times.append(datetime.fromisoformat(shown["last_request_time"]).timestamp())
    assert times == [5e9, 6e9]


async def test_prometheus_sees_the_open_models_of_a_key(server: Server) -> None:
    _, model = await server.create_model()
    step = StepMetrics(at=1.5, version=2, loss=0.25, num_sequences=3, num_tokens=12, grad_norm=0.5, learning_rate=0.125)
    owner, newest = server.log.model(model).owner, server.log.keys.newest_steps
    server.log.commit(model, owner, 0, Result.of_json({}), [Write.of(newest, model, step)])
    await server.post("/optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}})
    fresh_session, fresh = await server.create_model()
    assert await scrape(server) == {
        ("queued_commands", model): 1,
        ("queued_commands", fresh): 1,
        ("step_timestamp_seconds", model): 1.5,
        ("version", model): 2,
        ("loss", model): 0.25,
        ("sequences", model): 3,
        ("tokens", model): 12,
        ("grad_norm", model): 0.5,
        ("learning_rate", model): 0.125,
    }
    assert await scrape(server, OTHER_KEY) == {}
    await server.post(f"/sessions/{fresh_session}/finish", {})
    server.log.commit(fresh, owner, 0, Result.of_json({}))
    assert server.log.close(fresh)
    assert {each for _, each in await scrape(server)} == {model}


async def scrape(server: Server, key: dict[str, str] = KEY) -> dict[tuple[str, str], float]:
    """Return the values by name and model."""
    answer = await server.client.get("/metrics", headers=key)
    assert answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    samples = [sample for family in families for sample in family.samples]
    return {(each.name.removeprefix("offbeat_tinker_"), each.labels["model"]): each.value for each in samples}


async def test_a_command_of_another_key_is_refused(server: Server) -> None:
    _, model = await server.create_model()
    for path, body in (
        ("/optim_step", {"adam_params": {}}),
        ("/save_weights", {"path": "a"}),
        ("/save_weights_for_sampler", {"path": "a"}),
        ("/load_weights", {"path": "tinker://a/weights/b", "optimizer": True}),
        ("/get_info", {}),
    ):
        await server.post(path, {"model_id": model, "seq_id": 1, **body}, 404, OTHER_KEY)
    assert server.log.logged(model) == [0]


@pytest.mark.parametrize("key", [{}, {"X-API-Key": "sk-1"}])
async def test_every_route_but_health_needs_a_key(server: Server, key: dict[str, str]) -> None:
    routes = [each for each in router.routes if isinstance(each, APIRoute)]
    assert len(routes) > 20
    for route in routes:
        path = route.path.removeprefix("/api/v1").replace("{", "").replace("}", "").replace(":path", "")
        for method in route.methods:
            answer = await server.client.request(method, path, headers=key, json={})
            assert answer.status_code == (200 if path == "/healthz" else 401), path


def hostile_values(rng: np.random.Generator) -> Any:
    values: list[Any] = [
        *(None, True, -1, 0, 1 << 80, 1e308, -0.0, "", "\x00", "../..", "tinker://a/b/c", "ü" * 300, "\ud800"),
        *([], [1], [[1]], {}, {"a": 1}, {"chunks": []}, {"chunks": [{"type": "encoded_text", "tokens": [1 << 40]}]}),
    ]
    return values[int(rng.integers(len(values)))]


async def test_hostile_bodies_get_no_5xx(server: Server) -> None:
    """Valid bodies with spoiled fields, to every route; and noise in protobuf."""
    session, model = await server.create_model()
    valid: dict[str, Any] = {
        "session_id": session,
        "model_id": model,
        "seq_id": 1,
        "model_seq_id": 1,
        "base_model": "base",
        "lora_config": {"rank": 2},
        "adam_params": {"learning_rate": 0.1},
        "path": "a",
        "optimizer": False,
        "sampling_session_seq_id": 0,
        "sampling_session_id": f"{session}:sample:0",
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 2},
        "request_id": f"{session}:sample:0:1",
        "tinker_path": f"tinker://{model}/weights/a",
    }
    rng = np.random.default_rng(0)
    protobuf = forward_backward_body(target_tokens=np.array([2, 3, 4]))
    paths = [each for each in router.routes if isinstance(each, APIRoute) and "forward_backward" not in each.path]
    for i in range(NUM_HOSTILE):
        if i % 4 == 0:
            place, noise = int(rng.integers(len(protobuf))), rng.bytes(int(rng.integers(1, 20)))
            body = protobuf[:place] + noise + protobuf[place + len(noise) :]
            answer = await server.client.post(
                "/forward_backward", content=body, headers={**KEY, "Content-Type": PROTOBUF}
            )
        else:
            route = paths[int(rng.integers(len(paths)))]
            spoiled = {**valid, "seq_id": i}
            for name in rng.choice(list(valid), int(rng.integers(0, 4)), replace=False):
                spoiled[str(name)] = hostile_values(rng)
            path = route.path.removeprefix("/api/v1")
            for name in ("session_id", "model_id", "sampler_id", "checkpoint_id:path"):
                value = str(spoiled.get(name, "weights/a"))[:99] or "x"
                path = path.replace(f"{{{name}}}", quote(value, errors="surrogatepass"))
            answer = await server.client.request(
                next(iter(route.methods)), path, content=json.dumps(spoiled).encode(), headers=KEY
            )
        assert answer.status_code in ANSWERED, (answer.request.url, answer.status_code, answer.request.content)
        if answer.status_code != 200:
            assert "detail" in answer.json() or answer.json()["type"] == "try_again"

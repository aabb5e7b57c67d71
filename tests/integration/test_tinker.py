"""Tinker's API: the unmodified SDK trains, samples, saves and loads against real processes, which may be killed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from offbeat.benchmarks.studies.tinker_kills import KEY as KILLS_KEY
from offbeat.benchmarks.studies.tinker_kills import (
    LOAD_EVERY,
    PARTS,
    Killer,
    find_differences,
    record_under_kills,
    train_with_sdk,
)
from offbeat.benchmarks.tinker.recording import recording
from offbeat.benchmarks.tinker.replay import CommandReplay
from offbeat.benchmarks.tinker.server import LEARNER, RunningServer, running_server
from offbeat.deploy.config.loader import read_run
from offbeat.deploy.config.vocabulary import collect_words
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import read_vocab_size
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.tinker.base_model import load_base
from tests.families import write_family
from tests.integration.tinker_client import (
    ADAM,
    SENTENCE,
    adapter,
    are_equal,
    check_learning,
    check_logprobs,
    check_samplers,
    create,
    datum,
    sample,
    train,
)
from tests.waiting import PATIENCE_S, wait_until_sync

KEY, OTHER_KEY = "tml-one", "tml-other"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("tinker") / "run") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture
def service(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
        yield client


def test_a_model_learns_and_its_samples_have_the_trained_logprobs(service: tinker.ServiceClient) -> None:
    check_learning(service)


def test_a_snapshot_stays_and_inflight_follows(service: tinker.ServiceClient) -> None:
    check_samplers(service)


def test_a_mixture_of_experts_learns_and_its_samples_have_the_trained_logprobs(tmp_path: Path) -> None:
    """Its file has a tensor per expert, and its shared expert takes rows without a batch."""
    base, prefix = tmp_path / "base", "actor_infer.strategy_args"
    config = read_run(Path("quickstart"))
    write_tiny_policy(base, config.tiny, collect_words(config))
    write_family(base, "qwen2_moe", vocab_size=read_vocab_size(base), max_position_embeddings=512)
    load_base(base, ModelArgs(), seed=1).model.save_pretrained(base)
    overrides = (f"pretrain={base}", f"{prefix}.strategy_name=hf_infer", f"{prefix}.strategy_config=null")
    with running_server(tmp_path / "run", *overrides, "tinker.model_name=tiny") as server:
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
            check_logprobs(create(service))
        assert server.stop() == 0


def test_vllm_samples_for_more_models_than_it_holds(tmp_path: Path) -> None:
    """Its keys and values of the base, of a snapshot and of the newest weights stay apart."""
    with running_server(tmp_path / "run", "tinker.engine=vllm", "tinker.max_adapters=2") as server:
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
            for _ in range(2):
                check_learning(service)
                check_samplers(service)
        assert server.stop() == 0


def test_every_sampled_token_has_its_version(server: RunningServer, service: tinker.ServiceClient) -> None:
    """The SDK skips the field; another client reads it."""
    client = create(service)
    train(client, 3)
    path = client.save_weights_for_sampler("sampled").result().path
    session = service.holder.get_session_id()
    with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY}, timeout=PATIENCE_S) as http:
        body = {"session_id": session, "sampling_session_seq_id": 999, "model_path": path}
        sampler_id = http.post("/create_sampling_session", json=body).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]}
        ask = {
            "sampling_session_id": sampler_id,
            "seq_id": 0,
            "num_samples": 2,
            "prompt": prompt,
            "sampling_params": {"max_tokens": 5},
        }
        future = http.post("/asample", json=ask).json()
        assert http.post("/asample", json=ask).json() == future
        answer = http.post("/retrieve_future", json={"request_id": future["request_id"]}).json()
    assert [each["versions"] for each in answer["sequences"]] == [
        [3] * len(each["tokens"]) for each in answer["sequences"]
    ]


def test_an_ended_session_leaves_its_checkpoints_alone(server: RunningServer, service: tinker.ServiceClient) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as ending:
        client = create(ending)
        train(client, 1)
        client.save_weights_and_get_sampling_client().result()
        path = client.save_state("kept").result().path
        published = server.folder / "tinker" / "samplers" / client.model_id
        assert published.exists()
    wait_until_sync(lambda: not published.exists())
    assert train(service.create_training_client_from_state(path).result(), 1)


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_saved_state_continues_bit_for_bit(
    server: RunningServer, service: tinker.ServiceClient, with_optimizer: bool
) -> None:
    client = create(service)
    train(client, 3)
    path = client.save_state("start").result().path
    restore = (
        service.create_training_client_from_state_with_optimizer
        if with_optimizer
        else service.create_training_client_from_state
    )
    other = restore(path).result()
    assert are_equal(adapter(server.folder, path), adapter(server.folder, other.save_state("same").result().path))
    assert train(client, 2)[0] == train(other, 2)[0]
    ends = [adapter(server.folder, each.save_state("end").result().path) for each in (client, other)]
    assert are_equal(*ends) is with_optimizer


def test_a_path_is_immutable(service: tinker.ServiceClient) -> None:
    client = create(service)
    client.save_state("once").result()
    train(client, 1)
    with pytest.raises(tinker.RequestFailedError, match="immutable"):
        client.save_state("once").result()
    client.save_state("once", overwrite=True).result()
    with pytest.raises(tinker.RequestFailedError, match="can't be called"):
        client.save_state("../else").result()
    assert train(client, 1)


def test_chunks_of_a_call_add_up(server: RunningServer, service: tinker.ServiceClient) -> None:
    """Also where a client sends later chunks first: they are held until the first is there."""
    one, several = create(service), create(service)
    data = [datum(SENTENCE[: 3 + i]) for i in range(5)]
    whole = one.forward_backward(data, "cross_entropy").result()
    config = several.holder.get_client_config()
    assert not config.parallel_fwdbwd_chunks  # a client that waits at a limit of bytes would wait for itself
    unordered = {"fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": True}
    several.holder._client_config = config.model_copy(update=unordered)
    chunked = several.forward_backward(data, "cross_entropy").result()
    several.holder._client_config = config
    assert chunked.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"], rel=1e-5)
    assert len(chunked.loss_fn_outputs) == 5
    ends: list[dict[str, torch.Tensor]] = []
    for client in (one, several):
        client.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-3)).result()
        ends.append(adapter(server.folder, client.save_state("end").result().path))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "gspo", "dro"])
def test_reinforcement_raises_the_rewarded_token(service: tinker.ServiceClient, loss_fn: Any) -> None:
    client = create(service)
    score = {"weights": np.array([1], np.float32)}
    before = client.forward([datum([4, 9], **score)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    for _ in range(4):
        now = client.forward([datum([4, 9], **score)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
        inputs = {"logprobs": np.array(now.data, np.float32), "advantages": np.array([1], np.float32)}
        client.forward_backward([datum([4, 9], **inputs)], loss_fn).result()
        client.optim_step(ADAM).result()
    after = client.forward([datum([4, 9], **score)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    assert after.data[0] > before.data[0] + 0.3


def test_a_custom_loss_has_the_gradient_of_the_same_built_in_one(
    server: RunningServer, service: tinker.ServiceClient
) -> None:
    def negative_log_likelihood(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.cat(logprobs).sum(), {"own": 1.0}

    built_in, custom = create(service), create(service)
    built_in.forward_backward([datum()], "cross_entropy").result()
    metrics = custom.forward_backward_custom([datum()], negative_log_likelihood).result().metrics
    assert metrics["own"] == 1.0
    for client in (built_in, custom):
        client.optim_step(ADAM).result()
    ends = [adapter(server.folder, each.save_state("end").result().path) for each in (built_in, custom)]
    assert are_equal(*ends)


def test_what_is_refused_says_what_to_do_and_the_model_continues(service: tinker.ServiceClient) -> None:
    client = create(service)
    with pytest.raises(tinker.RequestFailedError, match='pass loss_fn="ppo"'):
        client.forward_backward([datum()], "stable_reinforce").result()
    with pytest.raises(tinker.RequestFailedError, match="no token ids from 0"):
        client.forward_backward([datum([4, 10_000])], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="call forward_backward before"):
        client.optim_step(ADAM).result()
    with pytest.raises(tinker.RequestFailedError, match=r"adam_params.beta1"):
        client.optim_step(types.AdamParams(beta1=1.5)).result()
    with pytest.raises(tinker.BadRequestError, match="'tiny'"):
        service.create_lora_training_client("else").result()
    with pytest.raises(tinker.BadRequestError, match="max_lora_rank"):
        service.create_lora_training_client("tiny", rank=1000).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, one_token = types.ModelInput.from_ints([4, 5]), types.SamplingParams(max_tokens=1)
    with pytest.raises(tinker.RequestFailedError, match=r"TrainingClient\.forward"):
        sampler.sample(prompt, 1, one_token, prompt_alt_tokens_k=2).result()
    assert train(client, 1)


def test_texts_and_tokens_stop_an_answer(service: tinker.ServiceClient) -> None:
    client = create(service)
    train(client, 20)
    sampler = client.save_weights_and_get_sampling_client().result()
    (answer,) = sample(sampler, temperature=0.0, stop=[8]).sequences
    assert (list(answer.tokens), answer.stop_reason) == (SENTENCE[1:4], "stop")
    word = client.get_tokenizer().decode([6])
    (answer,) = sample(sampler, temperature=0.0, stop=[word]).sequences
    assert (list(answer.tokens), answer.stop_reason) == (SENTENCE[1:5], "stop")


def test_another_key_finds_nothing(server: RunningServer, service: tinker.ServiceClient) -> None:
    client = create(service)
    path = client.save_state("mine").result().path
    sampler = client.save_weights_and_get_sampling_client().result()
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    assert [each.tinker_path for each in rest.list_checkpoints(client.model_id).result().checkpoints] == [path]
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    assert client.model_id in [each.training_run_id for each in rest.list_training_runs().result().training_runs]
    other = tinker.RestClient(base_url=server.url, api_key=OTHER_KEY)
    assert other.list_training_runs().result().training_runs == []
    assert other.list_user_checkpoints().result().checkpoints == []
    for call in (
        lambda: other.list_checkpoints(client.model_id),
        lambda: other.get_training_run(client.model_id),
        lambda: other.get_weights_info_by_tinker_path(path),
        lambda: other.get_sampler(sampler._sampling_session_id),
    ):
        with pytest.raises(tinker.NotFoundError):
            call().result()
    with tinker.ServiceClient(base_url=server.url, api_key=OTHER_KEY) as foreign:
        with pytest.raises(tinker.NotFoundError):
            foreign.create_training_client_from_state(path).result()
        with pytest.raises(tinker.NotFoundError):
            foreign.create_sampling_client(model_path=path).result()
    rest.delete_checkpoint(client.model_id, "weights/mine").result()
    assert rest.list_checkpoints(client.model_id).result().checkpoints == []


def test_a_run_with_kills_ends_as_the_same_commands_undisturbed(server: RunningServer) -> None:
    """Every part dies while commands and samples are in progress; the client only waits."""
    recorded = record_under_kills(server, train_with_sdk, Killer(server, kills=len(PARTS), seed=1))
    assert sorted(recorded.kills) == sorted(PARTS)
    assert recorded.num_steps >= 12
    assert find_differences(server, recorded) == []
    (model_id,) = {each.model_id for each in recorded.commands}
    url, headers = f"{server.url}/api/v1/training_runs/{model_id}", {"X-API-Key": KILLS_KEY}
    steps = httpx.get(f"{url}/metrics", headers=headers, timeout=PATIENCE_S).json()["steps"]
    assert [step["version"] for step in steps] == [i + 1 + i // LOAD_EVERY for i in range(recorded.num_steps)]
    assert httpx.get(f"{url}/why", headers=headers, timeout=PATIENCE_S).json()["queued"] == 0


def test_recorded_commands_leave_the_same_again_and_others_do_not(server: RunningServer) -> None:
    with recording(server.url) as recorder, tinker.ServiceClient(base_url=recorder.url, api_key=KEY) as service:
        client = service.create_lora_training_client("tiny", rank=4).result()  # the server draws the seed
        train(client, 2)
        client.load_state_with_optimizer(client.save_state("start").result().path).result()
        train(client, 1)
        client.save_state("end").result()
    first = CommandReplay(server.url, KEY, server.folder, recorder.commands)
    assert first.recorded().differences(first.repeat()) == []
    changed = {
        each: replace(command, body=command.body.replace(b"0.005", b"0.006"))
        for each, command in recorder.commands.items()
    }
    other = CommandReplay(server.url, KEY, server.folder, changed)
    differing = "".join(first.recorded().differences(other.repeat()))
    assert "grad_norm" in differing
    assert "weights/end" in differing


def test_an_open_model_is_exposed_for_prometheus(server: RunningServer, service: tinker.ServiceClient) -> None:
    client = create(service)
    train(client, 2)
    exposed = httpx.get(f"{server.url}/api/v1/metrics", headers={"X-API-Key": KEY}, timeout=PATIENCE_S).text
    assert f'offbeat_tinker_version{{model="{client.model_id}"}} 2.0\n' in exposed


def test_models_that_share_passes_survive_a_kill_to_the_bit(tmp_path: Path) -> None:
    """The learner dies before it has saved; its successor repeats the passes as they were."""
    with running_server(tmp_path / "run", "tinker.shared_pass_tokens=200") as server:
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
            clients = [create(service, seed) for seed in range(4)]
            ahead = [
                [client.forward_backward([datum(SENTENCE[i:])] * (i + 1), "cross_entropy") for _ in range(6)]
                for i, client in enumerate(clients)
            ]
            losses = [[each.result().metrics["loss:sum"] for each in calls] for calls in ahead]
            assert all(own == pytest.approx([own[0]] * 6, rel=1e-4) for own in losses)
            for client in clients:
                client.optim_step(ADAM).result()
            before = [client.save_state("before").result().path for client in clients]
            server.kill(LEARNER)
            after = [client.save_state("after").result().path for client in clients]
            for paths in zip(before, after, strict=True):
                assert are_equal(*(adapter(server.folder, path) for path in paths))
        assert server.stop() == 0
        written = (server.folder / "tinker" / "redis").rglob("*.aof*")
        assert any(b":shared_passes:" in file.read_bytes() for file in written)

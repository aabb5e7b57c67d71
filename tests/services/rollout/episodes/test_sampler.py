import pytest

from offbeat.services.errors import EpisodeError, GenerationError, RetryableError
from offbeat.services.generation.config import GeneratingArgs
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling
from offbeat.services.rollout.config import EnvManagerConfig, ManagerGeneratingArgs
from offbeat.services.rollout.episodes.sampler import EpisodeSampler, build_samplings
from offbeat.services.rollout.episodes.turn_batcher import TurnBatcher
from tests.fakes_rollout import FakeGeneration, worker_settings
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def sampler(client: FakeGeneration, *, timeout_s: float = 5.0, retry_s: float = 5.0) -> EpisodeSampler:
    sampling = Sampling(0.5, 0.9, 7, 64, stop_token_ids=(3,))
    return EpisodeSampler(TurnBatcher(client, 0.0, timeout_s), sampling, 2, retry_s=retry_s)


def answer(_: GenerateRequest) -> tuple[int, ...]:
    return (9, 3)


async def test_a_turn_is_sent_with_its_limit_and_the_episodes_sampling():
    client = FakeGeneration(answer)
    got = await sampler(client)((1, 2), 5)
    (request,) = client.calls[0]
    assert isinstance(got, Completion)
    assert (request.prompt, request.min_version) == ((1, 2), 2)
    assert request.sampling == Sampling(0.5, 0.9, 7, 5, (3,))


async def test_a_calls_stop_strings_join_those_of_the_run():
    client = FakeGeneration(answer)
    sampling = Sampling(max_new_tokens=5, stop_strings=("</a>",))
    sample = EpisodeSampler(TurnBatcher(client, 0.0, 5.0), sampling, 2, retry_s=5.0)
    await sample((1,), 5, stop_strings=("Observation:",))
    await sample((1,), 5)
    assert [call[0].sampling.stop_strings for call in client.calls] == [("</a>", "Observation:"), ("</a>",)]


async def test_evaluations_end_answers_as_training_does_unless_they_say_otherwise(tmp_path):
    args = GeneratingArgs(temperature=0.5, stop_strings=("</a>",))
    settings = worker_settings(tmp_path).model_copy(update={"generating_args": args})
    assert {name: each.stop_strings for name, each in build_samplings(settings, (3,)).items()} == {
        "train": ("</a>",), "sampled": ("</a>",), "greedy": ("</a>",), "baseline": ("</a>",)
    }  # fmt: skip
    own = EnvManagerConfig(generating_args=ManagerGeneratingArgs(stop_strings=()))
    evaluated = build_samplings(settings.model_copy(update={"val_env_manager": own}), (3,))
    assert [evaluated[name].stop_strings for name in ("train", "sampled", "greedy")] == [("</a>",), (), ()]


async def test_while_generation_is_replaced_the_same_turn_is_sent_again():
    client = FakeGeneration(answer)
    client.errors = [RetryableError("starting"), RetryableError("starting")]
    assert (await sampler(client)((1, 2, 3), 4)).token_ids == (9, 3)
    requests = [call[0] for call in client.calls]
    assert [request.prompt for request in requests] == [(1, 2, 3)] * 3
    assert len({request.request_id for request in requests}) == 3
    assert len({request.request_id.split("/")[0] for request in requests}) == 1


async def test_a_turn_without_a_replica_for_too_long_fails_its_episode():
    client = FakeGeneration(answer)
    client.errors = [RetryableError("gone")] * 100
    with pytest.raises(EpisodeError) as failed:
        await sampler(client, retry_s=2.0)((1,), 4)
    assert failed.value.reason == "generation_unavailable"
    assert 1 < len(client.calls) < 20


async def test_an_unanswered_turn_is_retried_then_fails_its_episode():
    client = FakeGeneration(answer, delay_s=lambda _: 60.0)
    with pytest.raises(EpisodeError) as failed:
        await sampler(client, timeout_s=0.2, retry_s=3.0)((1,), 4)
    assert failed.value.reason == "generation_timeout"
    await wait_until(lambda: len(client.aborted) == len(client.calls))
    assert len(client.calls) > 1


async def test_a_turn_that_was_lost_with_its_replica_is_answered_by_the_next():
    client = FakeGeneration(answer, delay_s=lambda r: 60.0 if r.request_id.endswith("/0") else 0.0)
    assert (await sampler(client, timeout_s=2.0)((1,), 4)).token_ids == (9, 3)
    assert [call[0].request_id[-2:] for call in client.calls] == ["/0", "/1"]


async def test_a_refused_turn_is_not_retried():
    client = FakeGeneration(answer)
    client.errors = [GenerationError("too long")]
    with pytest.raises(EpisodeError, match="too long") as failed:
        await sampler(client)((1,), 4)
    assert failed.value.reason == "generation_refused"
    assert len(client.calls) == 1


def test_evaluation_is_sampled_at_temperature_one_or_greedy(tmp_path):
    from offbeat.services.generation.config import GeneratingArgs

    settings = worker_settings(tmp_path, generating_args=GeneratingArgs(temperature=0.7, top_p=0.9, max_new_tokens=9))
    by_name = build_samplings(settings, (3,))
    assert by_name["train"] == Sampling(0.7, 0.9, -1, 9, (3,))
    assert by_name["sampled"] == Sampling(1.0, 1.0, -1, 9, (3,))
    manager = EnvManagerConfig(generating_args=ManagerGeneratingArgs(temperature=0.2, top_k=5, max_new_tokens=4))
    changed = build_samplings(settings.model_copy(update={"val_env_manager": manager}), (3,))
    assert changed["sampled"] == Sampling(0.2, 1.0, 5, 4, (3,))
    assert changed["greedy"] == Sampling(0.0, 1.0, -1, 4, (3,))
    assert changed["train"] == by_name["train"]
    assert by_name["greedy"].temperature == 0.0
    assert changed["baseline"] == Sampling(0.0, 1.0, -1, 9, (3,)), "as the episodes with which it is compared"

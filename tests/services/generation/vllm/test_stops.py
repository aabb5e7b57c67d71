"""Stop strings in vLLM's schedulers: what a step sampled behind one is left out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request, RequestStatus

from offbeat.services.generation.vllm.engine import sampling_parameters
from offbeat.services.generation.vllm.stops import AsyncStopScheduler, StopScheduler
from offbeat.services.messages.types import Sampling
from tests.integration.policy_weights import write_policy

pytestmark = pytest.mark.slow
W1, W2, END = 8, 9, 3
"""Tokens of the tiny policy's vocabulary: `w1`, `w2` and a stop token."""


class Scheduled:
    """A running request and its scheduler, without a model. Two drafts follow each token (speculative decoding)."""

    def __init__(self, kind: type[StopScheduler], folder: Path, sampling: Sampling, num_answered: int = 0) -> None:
        self.scheduler: Any = kind.__new__(kind)
        self.cached: list[int] = []
        self.scheduler.max_model_len = 512
        self.scheduler.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(folder)))
        self.scheduler.kv_cache_manager = SimpleNamespace(cache_blocks=lambda _, count: self.cached.append(count))
        self.request = Request("r", [4, 5, W1], sampling_parameters(sampling, num_answered), None)
        queued: list[Request] = []
        self.scheduler.requests, self.scheduler.log_stats, self.scheduler.spec_decode_metrics_level = {}, False, "none"
        self.scheduler._enqueue_waiting_request = queued.append
        self.scheduler.connector = self.scheduler.ec_connector = None
        self.scheduler.add_request(self.request)
        assert queued == [self.request]
        self.request.status = RequestStatus.RUNNING

    def step(self, *tokens: int) -> tuple[list[int], bool]:
        self.request.num_output_placeholders = 3
        return self.scheduler._update_request_with_output(self.request, list(tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("kind", [StopScheduler, AsyncStopScheduler])
def test_tokens_behind_a_stop_string_of_the_same_step_are_left_out(kind: type[StopScheduler], folder: Path) -> None:
    """The asynchronous one reserves places for them, which its own update gives back."""
    each = Scheduled(kind, folder, Sampling(max_new_tokens=50, stop_strings=("w1 w2",)))
    assert each.step(W2, W1) == ([W2, W1], False)
    assert each.step(W2, W1, W2) == ([W2], True)
    assert list(each.request.output_token_ids) == [W2, W1, W2]
    assert each.request.status is RequestStatus.FINISHED_STOPPED
    if kind is AsyncStopScheduler:
        assert each.request.num_output_placeholders == 2
        assert len(each.cached) == 3


@pytest.mark.parametrize("kind", [StopScheduler, AsyncStopScheduler])
def test_other_ends_stay_those_of_vllm(kind: type[StopScheduler], folder: Path) -> None:
    stops = {"stop_strings": ("w1 w2",), "stop_token_ids": (END,)}
    for sampling in (Sampling(max_new_tokens=50, **stops), Sampling(max_new_tokens=50, stop_token_ids=(END,))):
        each = Scheduled(kind, folder, sampling)
        assert each.step(W1, END, W2) == ([W1, END], True)
        assert each.request.status is RequestStatus.FINISHED_STOPPED
    cut = Scheduled(kind, folder, Sampling(max_new_tokens=2, **stops))
    assert cut.step(W2, W1, W2) == ([W2, W1], True)
    assert cut.request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    both = Scheduled(kind, folder, Sampling(max_new_tokens=2, **stops))
    assert both.step(W1, W2, W2) == ([W1, W2], True)
    assert both.request.status is RequestStatus.FINISHED_STOPPED


def test_without_stop_strings_the_schedulers_are_vllms(folder: Path) -> None:
    """Then their update costs nothing more; a request with some changes it for all, the others' answers included."""
    each = Scheduled(AsyncStopScheduler, folder, Sampling(max_new_tokens=3))
    update = each.scheduler._update_request_with_output
    assert update.__func__ is AsyncScheduler._update_request_with_output
    stopping = Request("s", [4], sampling_parameters(Sampling(stop_strings=("w1 w2",))), None)
    each.scheduler.add_request(stopping)
    assert each.scheduler._update_request_with_output != update
    assert each.step(W1, W2, W1) == ([W1, W2, W1], True)


def test_a_stop_string_may_begin_in_tokens_that_another_engine_sampled(folder: Path) -> None:
    each = Scheduled(StopScheduler, folder, Sampling(max_new_tokens=50, stop_strings=("w1 w2",)), num_answered=1)
    assert each.step(W2) == ([W2], True)
    other = Scheduled(StopScheduler, folder, Sampling(max_new_tokens=50, stop_strings=("w1 w2",)))
    assert other.step(W2) == ([W2], False)

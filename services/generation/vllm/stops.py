"""vLLM's schedulers with stop strings, in the engine's process, so that an answer ends with the very token that completes
one: vLLM's own checks a step later in another process, and not the turns of a session. Their statistics do not count
requests that new weights preempt.
"""

# pyright: basic
from pathlib import Path
from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from offbeat.services.chat.stops import stop_strings_of
from offbeat.services.generation.vllm.cpu_routing import records_routing

STOP_STRINGS, NUM_ANSWERED = "offbeat_stop_strings", "offbeat_num_answered"
"""In a request's `extra_args`."""


class StopScheduler(Scheduler):
    """vLLM's own until the first request with stop strings, so that they cost engines without any nothing."""

    def add_request(self, request: Request) -> None:
        if _arguments(request):
            self._update_request_with_output = self._update_to_stop
        super().add_request(request)

    def reset_prefix_cache(self, *arguments: Any, **named: Any) -> bool:
        """Preempt running requests without counting them, as it is for new weights and not for want of cache."""
        counts, self.log_stats = self.log_stats, False
        try:
            return super().reset_prefix_cache(*arguments, **named)
        finally:
            self.log_stats = counts

    def _update_to_stop(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        update = type(self)._update_request_with_output
        if not (arguments := _arguments(request)):
            return update(self, request, new_token_ids, is_stale)
        folder = Path(self.vllm_config.model_config.model)
        stops = stop_strings_of(folder, tuple(arguments[STOP_STRINGS]))
        stopped = False
        for count, token in enumerate(new_token_ids, 1):
            _, stopped = update(self, request, [token], is_stale)
            if stops.is_end(_answer(request, arguments[NUM_ANSWERED])):
                request.status = RequestStatus.FINISHED_STOPPED
                stopped = True
            if stopped:
                del new_token_ids[count:]
                break
        return new_token_ids, stopped


class AsyncStopScheduler(StopScheduler, AsyncScheduler):
    """`AsyncScheduler` with stop strings."""


def make_scheduler(vllm_config: Any, **arguments: Any) -> StopScheduler:
    """Return the scheduler that vLLM would take, with stop strings, and on a CPU with routed experts."""
    kind = AsyncStopScheduler if vllm_config.scheduler_config.async_scheduling else StopScheduler
    scheduler = kind(vllm_config=vllm_config, **arguments)
    if records_routing(vllm_config):
        scheduler.aux_output_connector = AuxOutputSchedulerConnector()
    return scheduler


def _arguments(request: Request) -> dict[str, Any] | None:
    """Return what was said of stop strings, None without any."""
    sampling: Any = request.sampling_params
    given = sampling.extra_args
    return given if given and STOP_STRINGS in given else None


def _answer(request: Request, num_answered: int) -> Any:
    if not num_answered:
        return request.output_token_ids
    return request.all_token_ids[request.num_prompt_tokens - num_answered :]

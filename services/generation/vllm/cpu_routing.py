"""Routed experts of vLLM's runner on CPUs, which its connector for them does not know.

vLLM records a token's experts in its routers, keeps those of cached blocks, and returns them with a request; of its two
runners, only the one that needs Triton tells it which tokens a step computed.
"""

# pyright: basic
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

from offbeat.services.generation.vllm.arguments import RECORDS_ROUTING


def records_routing(config: VllmConfig) -> bool:
    """Return whether the engine was started to return routed experts on a CPU."""
    return isinstance(config.additional_config, dict) and bool(config.additional_config.get(RECORDS_ROUTING))


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Tokens of a step, under the names of the other runner's batch.

    query_start_loc_np: [requests + 1], borders of the requests' tokens; num_computed_tokens_np: [requests], before it.
    """

    req_ids: Sequence[str]
    query_start_loc_np: Any
    num_computed_tokens_np: Any

    @classmethod
    def of(cls, runner: Any) -> "ComputedTokens":
        """Copy them, as the runner changes them when it samples."""
        ids = list(runner.input_batch.req_ids)
        borders = runner.query_start_loc.np[: len(ids) + 1].copy()
        return cls(ids, borders, runner.input_batch.num_computed_tokens_cpu[: len(ids)].copy())


class RoutingRecorder:
    """Steps of a runner, with which the connector goes along; the runner returns its outputs."""

    def __init__(self, runner: Any, config: VllmConfig) -> None:
        self._runner = runner
        self._connector = get_aux_output_connector(runner.get_model(), config, runner.kv_cache_config)
        self._execute_model, self._sample_tokens = runner.execute_model, runner.sample_tokens

    def attach(self) -> None:
        self._runner.execute_model = self.execute_model
        self._runner.sample_tokens = self.sample_tokens

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        self._connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return self._execute_model(scheduler_output, intermediate_tensors)

    def sample_tokens(self, grammar_output: Any) -> Any:
        tokens: Any = ComputedTokens.of(self._runner)
        output = self._sample_tokens(grammar_output)
        pending = self._connector.prepare_output(tokens)
        if pending is not None:  # only the first of a tensor-parallel group returns any
            sampled = [len(output.sampled_token_ids[output.req_id_to_index[each]]) for each in tokens.req_ids]
            pending.enqueue_cpu_copy(np.array(sampled), np.zeros(len(sampled), dtype=np.int64))
            output.aux_output_connector_output = pending.process_output()
        return output

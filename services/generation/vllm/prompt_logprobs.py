"""Most probable tokens at each position of given sequences, by vLLM."""

# pyright: basic
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat.services.generation.config import Dtype, EngineModelArgs, GenerationConfig
from offbeat.services.generation.vllm.engine import engine_arguments, engine_environment


class TopLogprobs(NamedTuple):
    """ids: [N - 1, K] int64, most probable first; logprobs: [N - 1, K] float64; of the tokens after a sequence's first."""

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]


class PromptLogprobs:
    """Engine with the weights of a folder, which samples nothing."""

    def __init__(self, folder: Path, k: int, max_tokens: int, dtype: Dtype, device: str, num_threads: int) -> None:
        """Start the engine; vLLM's errors pass. k: tokens per position; max_tokens: of a sequence."""
        config = GenerationConfig.model_validate(
            {"model_args": EngineModelArgs(dtype=dtype), "device": device, "cpus_per_replica": float(num_threads)}
        )
        os.environ.update(engine_environment(config))
        logging.getLogger("vllm").setLevel(logging.WARNING)
        from vllm import LLM, SamplingParams

        arguments = engine_arguments(config, folder, max_tokens + 1, 0)
        arguments |= {"load_format": "auto", "max_logprobs": k, "logprobs_mode": "raw_logprobs"}
        # Cached positions have no logits
        arguments |= {"enable_prefix_caching": False}
        del arguments["worker_extension_cls"]
        self._llm = LLM(**arguments)
        self._parameters = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=k, flat_logprobs=True, detokenize=False
        )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[TopLogprobs]:
        from vllm.inputs import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=list(tokens)) for tokens in sequences]
        outputs = self._llm.generate(prompts, self._parameters, use_tqdm=False)
        return [_read(output.prompt_logprobs) for output in outputs]


def _read(flat: Any) -> TopLogprobs:
    """Read vLLM's table: at each position but the first the given token, then the most probable ones."""
    places = zip(flat.start_indices[1:], flat.end_indices[1:], strict=True)
    rows = np.array([np.arange(start + 1, end) for start, end in places], dtype=np.int64)
    return TopLogprobs(np.array(flat.token_ids, dtype=np.int64)[rows], np.array(flat.logprobs, dtype=np.float64)[rows])

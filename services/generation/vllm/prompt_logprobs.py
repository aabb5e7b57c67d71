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
from offbeat.services.generation.vllm.arguments import engine_arguments, engine_environment
from offbeat.services.generation.vllm.without_torchvision import register_model


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

        register_model(folder)
        arguments = engine_arguments(config, folder, max_tokens, 0)
        arguments |= {
            "load_format": "auto",
            "enforce_eager": True,  # graphs are of decoding
            "max_logprobs": k,
            "logprobs_mode": "raw_logprobs",
            "enable_prefix_caching": False,  # cached positions have no logits
        }
        self._k = k
        self._llm = LLM(**arguments)
        self._parameters = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=k, logprobs=k, flat_logprobs=True, detokenize=False
        )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[TopLogprobs]:
        """Sequences have at least two tokens, and at most `max_tokens`."""
        from vllm.inputs import TokensPrompt

        # The last token's distribution is that of the one which vLLM samples in its place
        prompts = [TokensPrompt(prompt_token_ids=list(tokens[:-1])) for tokens in sequences]
        outputs = self._llm.generate(prompts, self._parameters, use_tqdm=False)
        return [_join(self._read(each.prompt_logprobs), self._read(each.outputs[0].logprobs)) for each in outputs]

    def _read(self, flat: Any) -> TopLogprobs:
        """Read vLLM's table: at each position, but a prompt's first, the token itself, then the most probable ones."""
        starts = [start for start, end in zip(flat.start_indices, flat.end_indices, strict=True) if start < end]
        rows = np.array(starts, dtype=np.int64)[:, None] + np.arange(1, self._k + 1)
        ids, logprobs = np.array(flat.token_ids, dtype=np.int64), np.array(flat.logprobs, dtype=np.float64)
        return TopLogprobs(ids[rows], logprobs[rows])


def _join(prompt: TopLogprobs, last: TopLogprobs) -> TopLogprobs:
    return TopLogprobs(np.concatenate([prompt.ids, last.ids]), np.concatenate([prompt.logprobs, last.logprobs]))

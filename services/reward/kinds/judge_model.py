"""A judge's own model: vLLM with the weights of a folder, in the replica's process."""

# pyright: basic
import logging
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from offbeat.services.chat.tokenizer import find_end_ids, load_tokenizer, require_template
from offbeat.services.errors import RolloutError
from offbeat.services.generation.config import EngineModelArgs, EngineStrategy, GenerationConfig
from offbeat.services.generation.vllm.arguments import engine_arguments, engine_environment
from offbeat.services.generation.vllm.engine import SHUTDOWN_TIMEOUT_S
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.kinds.model_config import LlmJudgeConfig

logger = logging.getLogger(__name__)


class JudgeModel:
    """`JudgeClient` with an engine that starts at the first question, or by `start`."""

    def __init__(self, config: LlmJudgeConfig, folder: Path) -> None:
        """Raises ValueError without a tokenizer or chat template."""
        self._config = config
        self._folder = folder
        try:
            self._tokenizer = load_tokenizer(folder)
            require_template(folder, self._tokenizer)
        except RolloutError as error:
            raise ValueError(f"reward {config.name!r}: {error}") from error
        self._end_ids = list(find_end_ids(folder, self._tokenizer))
        self._numbers = count()
        self._llm: Any = None

    async def start(self) -> Any:
        """Return the engine, started if it is not; blocks the event loop meanwhile. vLLM's errors propagate."""
        if self._llm is None:
            self._llm = _start_engine(self._config, self._folder)
        return self._llm

    async def check(self) -> None:
        """Raise if the engine died."""
        if self._llm is not None:
            await self._llm.check_health()

    async def complete(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Raises RewardError."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        llm, sampling = await self.start(), self._config.generating_args
        prompt = self._render(messages)
        if (room := llm.model_config.max_model_len - len(prompt)) < 1:
            raise RewardError(
                Failure.BAD_ROW, f"the question takes {len(prompt)} tokens, more than the judge's context"
            )
        parameters = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=min(sampling.max_new_tokens, room),
            stop_token_ids=self._end_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            answers = llm.generate(tokens_input(prompt), parameters, f"judge-{next(self._numbers)}")
            outputs = [each async for each in answers]
        except (VLLMClientError, ValueError) as error:
            raise RewardError(Failure.ERROR, str(error)) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise RewardError(Failure.UNAVAILABLE, f"the judge's engine failed: {error}") from error
        (answer,) = outputs[-1].outputs
        if answer.finish_reason == "length":
            raise RewardError(Failure.MALFORMED, "the judge's answer reached max_new_tokens or its context: raise it")
        return self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)

    async def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown(timeout=SHUTDOWN_TIMEOUT_S)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RewardError(Failure.BAD_ROW, f"the judge's chat template refuses the question: {error}") from error
        return list(rendered["input_ids"])


def _start_engine(config: LlmJudgeConfig, folder: Path) -> Any:
    generation = GenerationConfig(
        model_args=EngineModelArgs(dtype=config.model_args.dtype),
        strategy_args=EngineStrategy(strategy_config=config.strategy_args.strategy_config),
        device=config.device,
        cpus_per_replica=max(config.cpus_per_replica, 0.1),
        kv_cache_gib=config.kv_cache_gib,
    )
    os.environ.update(engine_environment(generation))
    logging.getLogger("vllm").setLevel(logging.WARNING)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**judge_arguments(generation, folder)))
    logger.info("judge %s: %s is loaded", config.name, folder)
    return llm


def judge_arguments(generation: GenerationConfig, folder: Path) -> dict[str, Any]:
    """Return the arguments of an engine that reads its weights from a folder itself."""
    arguments = engine_arguments(generation, folder, 0, 0)
    arguments["load_format"] = (generation.engine.model_extra or {}).get("load_format", "auto")
    if generation.engine.max_model_len is None:
        del arguments["max_model_len"]  # the model's own
    return arguments

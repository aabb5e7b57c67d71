"""Start of the engine that a configuration names.

Each imports libraries that take seconds, and that the others do not need.
"""

from pathlib import Path

from offbeat.services.chat.vision import reads_images
from offbeat.services.errors import GenerationError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import PolicyEngine, TenantEngine
from offbeat.services.process import uncollected_imports


async def start_engine(
    config: GenerationConfig, model: Path, *, sequence_length: int, seed: int, transport: str
) -> TenantEngine:
    """Start an engine with random weights. transport: `WeightsConfig.transport`."""
    if config.strategy_args.strategy_name == "hf_infer":
        with uncollected_imports():
            from offbeat.services.generation.hf.engine import HfEngine

        return await HfEngine.start(config, model, sequence_length=sequence_length, seed=seed)
    if config.strategy_args.strategy_name == "sglang":
        from offbeat.services.generation.sglang.engine import SglangEngine

        return await SglangEngine.start(config, model, sequence_length=sequence_length, seed=seed)
    if config.engine.max_loras > 1:
        from offbeat.services.generation.vllm.shared import VllmSharedEngine

        return await VllmSharedEngine.start(
            config, model, sequence_length=sequence_length, seed=seed, transport=transport
        )
    from offbeat.services.generation.vllm.engine import VllmEngine

    return await VllmEngine.start(config, model, sequence_length=sequence_length, seed=seed, transport=transport)


async def start_serving(
    config: GenerationConfig, model: Path, version: int, *, sequence_length: int, seed: int
) -> PolicyEngine:
    """Start an engine that serves the weights of folder `model`, as `version`, and no others.

    Raises:
        GenerationError: it does not serve such a model, or does not start.
        RetryableError: it died while it started.
    """
    config = serving_config(config, version)
    if config.strategy_args.strategy_name == "hf_infer":
        if reads_images(model, config.model_args.image_input):
            raise GenerationError("the policy has image input, and hf_infer reads none: take vllm")
        with uncollected_imports():
            from offbeat.services.generation.hf.engine import HfEngine

        return await HfEngine.start(config, model, sequence_length=sequence_length, seed=seed, version=version)
    if config.strategy_args.strategy_name == "sglang":
        from offbeat.services.generation.sglang.engine import SglangEngine

        return await SglangEngine.start(config, model, sequence_length=sequence_length, seed=seed)
    from offbeat.services.generation.vllm.engine import VllmEngine, engine_failures

    with engine_failures():
        engine = await VllmEngine.start(config, model, sequence_length=sequence_length, seed=seed)
        await engine.llm.update_weight_version(str(version))
    return engine


def serving_config(config: GenerationConfig, version: int) -> GenerationConfig:
    """Return the configuration of an engine that reads the folder's weights, and neither takes others nor sleeps."""
    config = config.with_engine(max_lora_rank=None, max_loras=1, enable_sleep_mode=False)
    match config.strategy_args.strategy_name:
        case "vllm":
            return config.with_engine(load_format="auto")
        case "sglang":
            return config.with_engine(load_format="auto", weight_version=str(version))
        case "hf_infer":
            return config

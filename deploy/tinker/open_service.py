"""Tinker's service with its engine, in the process that answers HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec
from fastapi import FastAPI

from offbeat.services.chat.tokenizer import find_end_ids, load_tokenizer
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.hf.engine import HfEngine
from offbeat.services.generation.tenancy import read_architecture
from offbeat.services.generation.vllm.adapters import VllmAdapterEngine
from offbeat.services.redis.connection import connect_async
from offbeat.services.tinker.app import create_app
from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.owners import read_keys
from offbeat.services.tinker.sampling import BASE_VERSION, Sampler
from offbeat.services.tinker.schemas import MAX_TOP
from offbeat.services.tinker.service import BaseModelInfo, TinkerService
from offbeat.services.tinker.store import TinkerStore

POLL_S = 0.1
REDIS_CONNECTIONS = 256
"""Waiting fetches hold none."""


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """weights: file of the base model, provided by the learner; generation, tinker: JSON of configs."""

    name: str
    redis_url: str
    model: str
    model_name: str
    weights: str
    generation: str
    tinker: str
    context: int
    seed: int


@dataclass(frozen=True, slots=True)
class OpenService:
    app: FastAPI
    service: TinkerService


@asynccontextmanager
async def open_service(settings: ServiceSettings) -> AsyncIterator[OpenService]:
    """Start the engine on the learner's weights, for as long as the context is open."""
    config = TinkerConfig.model_validate_json(settings.tinker)
    model = Path(settings.model)
    generation = GenerationConfig.model_validate_json(settings.generation)
    engine = await _start_engine(settings, generation, config)
    redis = connect_async(settings.redis_url, max_connections=REDIS_CONNECTIONS)
    try:
        await _wait_for_file(anyio.Path(settings.weights))  # of the learner
        await engine.load(Path(settings.weights), BASE_VERSION)
        sampler = Sampler(
            engine,
            find_end_ids(model, load_tokenizer(model)),
            context=settings.context,
            max_adapters=config.max_adapters,
        )
        architecture = str(read_architecture(model).get("model_type", ""))
        base = BaseModelInfo(settings.model_name, str(model), architecture, settings.context)
        service = TinkerService(TinkerStore(redis, settings.name, config), sampler, base, config)
        yield OpenService(create_app(service, read_keys(config.keys_file), config), service)
    finally:
        engine.close()
        await redis.aclose()


async def _start_engine(
    settings: ServiceSettings, generation: GenerationConfig, config: TinkerConfig
) -> HfEngine | VllmAdapterEngine:
    model = Path(settings.model)
    if config.engine_on(generation.device) == "hf_infer":
        return await HfEngine.start(generation, model, sequence_length=settings.context, seed=settings.seed)
    return await VllmAdapterEngine.start(
        generation,
        model,
        sequence_length=settings.context,
        seed=settings.seed,
        max_adapters=config.max_adapters,
        max_lora_rank=config.max_lora_rank,
        max_top=MAX_TOP,
    )


async def _wait_for_file(path: anyio.Path) -> None:
    while True:
        if await path.exists():
            return
        await asyncio.sleep(POLL_S)

# pyright: basic
"""Matches a run to a deployed generation application.

Invariant: an application serves one run at a time; a run that names none only gets one that equals its configuration.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import collect_words
from offbeat.services.generation.config import GenerationConfig, app_name
from offbeat.services.generation.tenancy import EngineOffer, read_architecture
from offbeat.services.generation.vllm.engine import BACKENDS
from offbeat.trainer.config.issue import ConfigIssue

KEY = "actor_infer.app"
NOT_ARCHITECTURE = {"_name_or_path", "transformers_version", "initializer_range", "dtype", "torch_dtype"}
"""Keys of `config.json` that an engine which gets its weights from the broker does not go by."""
OF_THE_RUN = {"app", "generating_args", "request_timeout_s", "update_timeout_s", "cpus_per_replica"}
"""Keys of `actor_infer` that may differ between a run and an application that it did not name."""


def choose_app(
    config: RunConfig, offers: Mapping[str, EngineOffer], is_free: Callable[[str], bool]
) -> tuple[str | None, list[ConfigIssue]]:
    """Return the deployed application for the run, None if it starts its own, and the issues that forbid it.

    offers: the deployed applications. is_free: True if no other active run has claimed the application.
    """
    named = config.actor_infer.app
    if named == app_name(config.exp_name):
        return None, []
    if named is None:
        architecture = architecture_of(config) if offers else {}
        fitting = (
            app
            for app, offer in sorted(offers.items())
            if is_free(app) and not any(misfits(config, architecture, offer)) and is_alike(config.actor_infer, offer)
        )
        return next(fitting, None), []
    offer = offers.get(named)
    if offer is None and not is_free(named):
        return named, []  # a run's own: who creates the run is told which one has it
    if offer is None:
        there = ", ".join(sorted(offers)) or "none"
        return None, [
            ConfigIssue(KEY, f"no generation application {named!r} is deployed that any run may use; there is {there}")
        ]
    return named, [ConfigIssue(KEY, f"{named}: {misfit}") for misfit in misfits(config, architecture_of(config), offer)]


def misfits(config: RunConfig, architecture: Mapping[str, JsonValue], offer: EngineOffer) -> Iterator[str]:
    """Yield the reasons why the application can't sample for the run."""
    other = sorted(key for key in architecture.keys() | offer.architecture.keys() if _differ(key, architecture, offer))
    if other:
        yield f"its model is another one: {', '.join(other)} of config.json differ"
    if config.sequence_length > offer.sequence_length:
        yield f"its context of {offer.sequence_length} tokens is below the run's sequence_length of {config.sequence_length}"
    if BACKENDS[config.weights.transport] != BACKENDS[offer.transport]:
        yield f"takes weights by {offer.transport}, the run sends them by {config.weights.transport} (weights.transport)"
    room, rank = offer.config.max_lora_rank, config.actor_infer.max_lora_rank
    if (room is None) != (rank is None) or (room or 0) < (rank or 0):
        yield f"its max_lora_rank is {room}, the run's is {rank}"
    if config.actor_infer.on_weight_update != offer.config.on_weight_update:
        yield f"its on_weight_update is {offer.config.on_weight_update}"


def is_alike(wanted: GenerationConfig, offer: EngineOffer) -> bool:
    """Return True if the application equals what the run would deploy."""
    return wanted.model_dump(exclude=OF_THE_RUN) == offer.config.model_dump(exclude=OF_THE_RUN)


def architecture_of(config: RunConfig) -> dict[str, JsonValue]:
    """Return `config.json` of the run's policy, which may not have been written yet."""
    if config.pretrain != "tiny":
        return read_architecture(Path(config.pretrain))
    from offbeat.trainer.models.tiny import write_tiny_policy  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_policy(Path(folder), config.tiny, collect_words(config))
        return read_architecture(Path(folder))


def _differ(key: str, architecture: Mapping[str, JsonValue], offer: EngineOffer) -> bool:
    return key not in NOT_ARCHITECTURE and architecture.get(key) != offer.architecture.get(key)

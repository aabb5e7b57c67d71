# pyright: basic
"""Matching of runs to deployed generation applications.

Invariant: an application serves one run at a time, or up to `max_loras` runs with adapters; unless named by the run, it
must equal its configuration, but for room for larger or more adapters.
"""

from collections.abc import Callable, Iterator, Mapping

from pydantic import JsonValue

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import load_architecture
from offbeat.services.chat.vision import TEXT_UNLESS_ASKED
from offbeat.services.generation.config import ROUTED_EXPERTS, GenerationConfig, app_name
from offbeat.services.generation.tenancy import EngineOffer
from offbeat.services.generation.vllm.engine import BACKENDS
from offbeat.trainer.config.issue import ConfigIssue

APP_KEY = "actor_infer.app"
IGNORED_ARCHITECTURE_KEYS = {"_name_or_path", "transformers_version", "initializer_range", "dtype", "torch_dtype"}
"""`config.json` keys without effect on an engine with the broker's weights."""
RUN_SPECIFIC_KEYS = {"app", "generating_args", "request_timeout_s", "cpus_per_replica"}
"""`actor_infer` keys that may differ."""


def choose_app(
    config: RunConfig, offers: Mapping[str, EngineOffer], is_free: Callable[[str], bool]
) -> tuple[str | None, list[ConfigIssue]]:
    """Return the run's application (None: its own) and issues. is_free: has room beside other active runs."""
    named, own = config.actor_infer.app, app_name(config.exp_name)
    if own in offers and config.uses_engine:  # the run would take it for its own, and delete it at its end
        return None, [
            ConfigIssue(
                "exp_name",
                f"{own} is an application of the deploy file, and would be the name of this run's own: choose another name",
            )
        ]
    if named == own:
        return None, []
    if named is None:
        architecture = load_architecture(config) if offers else {}
        matching = (
            app
            for app, offer in sorted(offers.items())
            if is_free(app)
            and not any(find_mismatches(config, architecture, offer))
            and is_equivalent(config.actor_infer, offer)
        )
        return next(matching, None), []
    offer = offers.get(named)
    if offer is None and not is_free(named):
        return named, []  # deployed by the run that holds it: claiming it fails with that run's name
    if offer is None:
        available = ", ".join(sorted(offers)) or "none"
        return None, [
            ConfigIssue(
                APP_KEY, f"no generation application {named!r} is deployed that any run may use; there is {available}"
            )
        ]
    return named, [
        ConfigIssue(APP_KEY, f"{named}: {mismatch}")
        for mismatch in find_mismatches(config, load_architecture(config), offer)
    ]


def use_app(config: RunConfig, app: str | None) -> RunConfig:
    """Return the run with its application (None: as configured). Engines of the deploy file take no turns with a learner,
    which then stays on its devices.
    """
    infer = config.actor_infer.model_copy(update={"app": app or config.actor_infer.app})
    if infer.app not in (None, app_name(config.exp_name)):
        infer = infer.with_engine(enable_sleep_mode=None)
    return config.model_copy(update={"actor_infer": infer})


def find_mismatches(config: RunConfig, architecture: Mapping[str, JsonValue], offer: EngineOffer) -> Iterator[str]:
    different = sorted(
        key for key in architecture.keys() | offer.architecture.keys() if _is_different(key, architecture, offer)
    )
    if different:
        yield f"its model differs from the run's: {', '.join(different)} of config.json differ"
    if offer.architecture.get("model_type") in TEXT_UNLESS_ASKED:
        offered, requested = (bool(each.model_args.image_input) for each in (offer.config, config.actor_infer))
        if offered != requested:
            yield f"its model_args.image_input is {offered}, the run's is {requested}"
    if config.sequence_length > offer.sequence_length:
        yield f"its context of {offer.sequence_length} tokens is below the run's sequence_length of {config.sequence_length}"
    offered, requested = (each.strategy_args.strategy_name for each in (offer.config, config.actor_infer))
    if offered != requested:
        yield f"its engine is {offered}, the run's is {requested} (actor_infer.strategy_args.strategy_name)"
    if BACKENDS[config.weights.transport] != BACKENDS[offer.transport]:
        yield f"takes weights by {offer.transport}, the run sends them by {config.weights.transport} (weights.transport)"
    offered_rank, requested_rank = offer.config.engine.max_lora_rank, config.actor_infer.engine.max_lora_rank
    if (offered_rank is None) != (requested_rank is None) or (offered_rank or 0) < (requested_rank or 0):
        advice = _advise_rank(offered_rank, requested_rank)
        yield f"its max_lora_rank is {offered_rank}, the run's is {requested_rank}: {advice}"
    if config.actor_infer.returns_routing and not offer.config.returns_routing:
        yield f"its engines return no experts, which router_replay needs (strategy_config.{ROUTED_EXPERTS})"
    if offer.config.returns_routing and not config.actor_infer.returns_routing:
        yield f"its engines return experts (strategy_config.{ROUTED_EXPERTS}), which runs with router_replay alone read"
    if config.actor_infer.on_weight_update != offer.config.on_weight_update:
        yield f"its on_weight_update is {offer.config.on_weight_update}"


def is_equivalent(requested: GenerationConfig, offer: EngineOffer) -> bool:
    ignored = RUN_SPECIFIC_KEYS | ({"device_mapping"} if requested.device_mapping is None else set[str]())
    sides = [each.model_dump(exclude=ignored) for each in (requested, offer.config)]
    for side in sides:
        side["model_args"].pop("image_input")  # of some families alone, where it is compared
        engine = side["strategy_args"]["strategy_config"]
        engine.pop("enable_sleep_mode")  # a deployed engine takes no turns
        engine.pop("max_loras")
        engine.pop("enforce_eager")  # true in the records of earlier builds
        if offer.config.engine.max_loras > 1:
            engine.pop("max_lora_rank")  # room for a larger one changes nothing
    return sides[0] == sides[1]


def _advise_rank(offered: int | None, requested: int | None) -> str:
    if offered is None:
        return "its engines take whole weights alone; leave max_lora_rank out"
    if requested is not None:
        return f"take up to {offered} for max_lora_rank and actor_train.model_args.lora_rank, or another application"
    return f"its engines take adapters alone; set actor_train.model_args.lora_target, and both ranks up to {offered}"


def _is_different(key: str, architecture: Mapping[str, JsonValue], offer: EngineOffer) -> bool:
    return key not in IGNORED_ARCHITECTURE_KEYS and architecture.get(key) != offer.architecture.get(key)

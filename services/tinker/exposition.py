"""Open models for Prometheus; those of a key in its text format."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from offbeat.services.tinker.records import StepMetrics
from offbeat.services.tinker.store import TinkerStore

PREFIX = "offbeat_tinker"
QUEUED = "queued_commands"
FAMILIES = {
    QUEUED: "Commands of the model that are not applied.",
    "step_timestamp_seconds": "Unix time of the model's newest optimizer step.",
    "version": "Changes of the model's weights, at that step.",
    "loss": "Loss of that step's gradient, summed over its sequences.",
    "sequences": "Sequences of that step's gradient.",
    "tokens": "Tokens of that step's gradient.",
    "grad_norm": "Norm of that step's gradient.",
    "learning_rate": "Learning rate of that step.",
}


async def expose(store: TinkerStore, owner: str, accept: str) -> tuple[bytes, str]:
    """Return the metrics, and their media type by the scraper's `Accept` header."""
    families = {name: GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["model"]) for name, text in FAMILIES.items()}
    for model_id, values in (await read_values(store, await store.open_models(owner))).items():
        for name, value in values.items():
            families[name].add_metric([model_id], value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ModelFamilies(families.values()))
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type


async def read_values(store: TinkerStore, models: Collection[str]) -> Mapping[str, Mapping[str, float]]:
    """Return the models' values by family."""
    model_ids = sorted(models)
    steps = await store.newest_steps(model_ids)
    values: dict[str, dict[str, float]] = {}
    for model_id in model_ids:
        _, queued = await store.queued(model_id)
        values[model_id] = {QUEUED: len(queued), **(_values(steps[model_id]) if model_id in steps else {})}
    return values


def _values(step: StepMetrics) -> dict[str, float]:
    return {
        "step_timestamp_seconds": step.at,
        "version": step.version,
        "loss": step.loss,
        "sequences": step.num_sequences,
        "tokens": step.num_tokens,
        "grad_norm": step.grad_norm,
        "learning_rate": step.learning_rate,
    }


class _ModelFamilies(Collector):
    def __init__(self, families: Iterable[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families

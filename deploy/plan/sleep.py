"""Engines that sleep while the learner trains on their devices."""

from offbeat.deploy.config.run import RunConfig


def all_sleep(config: RunConfig) -> bool:
    """Return whether all engines sleep while the learner trains; without `device_mapping` all are on its devices."""
    return config.takes_turns and not engines_elsewhere(config)


def engines_elsewhere(config: RunConfig) -> bool:
    """Return whether the mapped devices of some engines are not the learner's."""
    engines, learner = config.actor_infer.device_mapping, config.actor_train.device_mapping
    return engines is not None and learner is not None and not set(engines) <= set(learner)


def planned_notes(config: RunConfig) -> tuple[str, ...]:
    """Return what the simulation leaves out of a configuration."""
    if not (config.takes_turns and engines_elsewhere(config)):
        return ()
    return (
        "engines on the learner's devices sleep while it trains, others do not: simulated as if none did, so rates are "
        "too high",
    )


def measured_notes(config: RunConfig) -> tuple[str, ...]:
    """Return a note on times of a run whose turns went on while its engines slept."""
    if not config.takes_turns or config.max_staleness == 0:
        return ()
    return (
        "the measured run's engines slept while its learner trained, which its turns' times contain: predictions are too "
        "slow; measure a run with max_staleness 0",
    )

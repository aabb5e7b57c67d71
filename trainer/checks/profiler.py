from collections.abc import Iterator

from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.learner import LearnerConfig


def check_profiler(config: LearnerConfig) -> Iterator[ConfigIssue]:
    if not config.profiler_timeline and not config.profiler_memory:
        if config.profiler_steps != LearnerConfig.model_fields["profiler_steps"].default:
            yield ConfigIssue(
                "profiler_steps", "has no effect without profiler_timeline or profiler_memory: set one of them"
            )
        return
    if config.profiler_memory and config.actor_train.device == "cpu":
        yield ConfigIssue(
            "profiler_memory",
            "records CUDA's allocations, but actor_train.device is cpu: leave it out, or train on a GPU",
        )
    if not any(step <= config.max_steps for step in config.profiler_steps):
        yield ConfigIssue(
            "profiler_steps", f"holds no step of this run: list numbers from 1 to max_steps, {config.max_steps}"
        )

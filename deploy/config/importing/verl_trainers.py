"""Asynchronous trainers of verl: fully_async_main, one_step_off_policy, and the modes of 0.9's V1 trainer.

A step is a batch that verl trains on at once: of fully_async_main `ppo_mini_batch_size * require_batches` prompts. Its
engines have new weights after `trigger_parameter_sync_step` of them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import ABSENT, Key, Rule, Rules, Tree, get, missing, no_effect, same

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ARGS = "actor_train.training_args"
NAME = "(trainer)"
"""Key of the trainer's name in a source's tree; Hydra has no such key."""
FULLY_ASYNC, ONE_STEP_OFF = "fully_async", "one_step_off"
V1_MODES = ("colocate_async", "separate_async")
PROMPTS, RESPONSES = 1024, 1
"""verl's defaults of train_batch_size and rollout.n."""
OFF = (-1, 0)
STALENESS, SYNC, REQUIRED = (f"async_training.{name}" for name in (
    "staleness_threshold", "trigger_parameter_sync_step", "require_batches"))  # fmt: skip
TOTAL = "rollout.total_rollout_steps"
LIMIT = "trainer.v1.sampler.max_off_policy_threshold"
NUMBERS = {
    STALENESS: 0.1, SYNC: 4, REQUIRED: 1, TOTAL: 100, f"{ACTOR}.ppo_mini_batch_size": 256,
    LIMIT: 8, **{f"trainer.v1.{mode}.num_warmup_batches": 1 for mode in V1_MODES},
}  # fmt: skip
"""verl's defaults of these trainers."""
OLD_KEYS = ("async_training.compute_prox_log_prob", "async_training.use_rollout_log_probs")
"""Of verl 0.7, whose fully_async_main has no bypass mode unless it is set."""
BYPASS = "algorithm.rollout_correction.bypass_mode"
MODULE = re.compile(r"(?P<fully>fully_async_(?:main|ppo))|one_step_off_(?:policy\S*main_ppo|ppo)")


def name_trainer(words: Iterable[str]) -> str:
    """Return the asynchronous trainer that a script's words, or a file's defaults, name; empty for another one."""
    found = next((match for word in words if "=" not in word and (match := MODULE.search(word))), None)
    return "" if found is None else FULLY_ASYNC if found["fully"] else ONE_STEP_OFF


def trainer(tree: Tree) -> str:
    """Return the asynchronous trainer of a source; empty for a synchronous one."""
    if tree.get(NAME):
        return tree[NAME]
    if isinstance(tree.get("async_training"), dict):
        return FULLY_ASYNC
    mode = get(tree, "trainer.v1.trainer_mode")
    return mode if mode in V1_MODES and get(tree, "trainer.use_v1", True) else ""


def bypasses(tree: Tree) -> bool:
    """Return whether verl takes the engines' logprobs and PPO's loss, as its asynchronous trainers do by default."""
    value = get(tree, BYPASS)
    return bool(value) if value is not None else is_bypass_default(tree) and not _has_old_keys(tree)


def is_bypass_default(tree: Tree) -> bool:
    return trainer(tree) in (FULLY_ASYNC, ONE_STEP_OFF)


def takes_behavior_logprobs(tree: Tree) -> bool:
    """Return whether the trainer's defaults make the engines' logprobs the ratio's denominator."""
    is_old = trainer(tree) == FULLY_ASYNC and _has_old_keys(tree) and not get(tree, OLD_KEYS[0])
    return get(tree, BYPASS) is None and (bypasses(tree) or is_old)


def count_prompts(tree: Tree) -> int:
    """Return the prompts of a step, verl's default if they are a reference."""
    if trainer(tree) == FULLY_ASYNC:
        return _number(tree, f"{ACTOR}.ppo_mini_batch_size") * _number(tree, REQUIRED)
    prompts = get(tree, "data.train_batch_size")
    return prompts if prompts and isinstance(prompts, int) else PROMPTS


def count_steps(tree: Tree) -> int | None:
    """Return the steps of fully_async_main, a multiple of those between two versions; None for another trainer."""
    if trainer(tree) != FULLY_ASYNC:
        return None
    period = _number(tree, SYNC)
    return int(_number(tree, TOTAL) // max(1, count_prompts(tree) * period)) * period


def count_versions(tree: Tree) -> Any:
    """Return the steps of verl's schedule of learning rates; fully_async_main counts its updates of engines."""
    steps = count_steps(tree)
    return get(tree, "trainer.total_training_steps") if steps is None else steps // max(1, _number(tree, SYNC))


def max_staleness(tree: Tree) -> float:
    """Return how many steps ahead the trainer samples.

    Between two updates of its engines fully_async_main samples at most `(1 + staleness_threshold) *
    trigger_parameter_sync_step` batches, where admission has `max_staleness + 1`. V1 samples `num_warmup_batches` ahead.
    """
    match trainer(tree):
        case "fully_async":
            ahead = round((1 + _number(tree, STALENESS)) * _number(tree, SYNC) - 1, 6)
            return int(ahead) if ahead == int(ahead) else ahead
        case "one_step_off":
            return 1
        case "colocate_async" | "separate_async" as mode:
            return max(0, min(_warmup_batches(tree, mode), _number(tree, LIMIT) - 1))
        case _:
            return 0


def trainer_defaults(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield what the trainer adds to verl's defaults."""
    prompts, ahead = count_prompts(tree), max_staleness(tree)
    yield "max_staleness", ahead
    match trainer(tree):
        case "fully_async":
            yield "model_update_frequency", _number(tree, SYNC)
            yield f"{ARGS}.num_minibatches", _number(tree, REQUIRED)
            if steps := count_steps(tree):
                yield "max_steps", steps
            if _number(tree, STALENESS) > 0:
                yield "buffer.stale_policy", "train"  # verl drops no group
        case "one_step_off":
            yield "buffer.order", "admission"  # batches are sampled whole
        case "colocate_async" | "separate_async":
            yield "train_env_manager.num_env_groups", prompts * (1 + int(ahead))
            if ahead:
                yield "buffer.stale_policy", "train"
        case _:
            pass
    yield "train_env_manager.num_env_groups", prompts


def _warmup_batches(tree: Tree, mode: str) -> int:
    return _number(tree, f"trainer.v1.{mode}.num_warmup_batches")


def _number(tree: Tree, name: str) -> Any:
    value = get(tree, name)
    return value if isinstance(value, int | float) else NUMBERS[name]


def _has_old_keys(tree: Tree) -> bool:
    return any(get(tree, name, ABSENT) is not ABSENT for name in OLD_KEYS)


def _fully_async(rule: Rule) -> Rule:
    """Apply a rule only to fully_async_main."""
    return lambda key: rule(key) if trainer(key.tree) == FULLY_ASYNC else None


def _from_number(convert: Callable[[Key], Outcome], target: str) -> Rule:
    """Convert a number; a reference to the environment is left to the user."""
    return lambda key: (
        convert(key)
        if isinstance(key.value, int | float)
        else Outcome("no counterpart", note=f"no number: set {target}")
    )


def _staleness(key: Key) -> Outcome:
    threshold, period = _number(key.tree, STALENESS), _number(key.tree, SYNC)
    note = f"in versions, one per step: (1 + {threshold:g}) x {period} - 1; a fraction is that of a batch"
    return Outcome("value", ("max_staleness",), max_staleness(key.tree), note)


def _batch(key: Key) -> Outcome:
    responses, prompts = get(key.tree, f"{ROLLOUT}.n") or RESPONSES, count_prompts(key.tree)
    if not isinstance(responses, int):
        return Outcome("no counterpart", note="rollout.n is no number: set rollout_batch_size")
    note = f"responses, of {_number(key.tree, REQUIRED)} mini-batches: require_batches"
    return Outcome("value", ("rollout_batch_size",), prompts * responses, note)


def _total(key: Key) -> Outcome:
    steps, prompts = count_steps(key.tree), count_prompts(key.tree)
    if not steps:
        return Outcome(
            "no counterpart", note=f"fewer than the {prompts * _number(key.tree, SYNC)} prompts of a version"
        )
    return Outcome("value", ("max_steps",), steps, f"{key.value} prompts, {prompts} per step")


def _period(target: str, off: Outcome) -> Rule:
    """Convert a period in updates of the engines; verl's -1 and 0 are off."""

    def rule(key: Key) -> Outcome:
        steps = key.value * _number(key.tree, SYNC)
        return off if key.value in OFF else Outcome("value", (target,), steps, "steps; there, updates of the engines")

    return _fully_async(_from_number(rule, target))


def _test_freq(key: Key) -> Outcome | None:
    if key.path[0] == "trainer" and get(key.tree, "rollout.test_freq") is not None:
        return Outcome("no effect", note="rollout.test_freq counts")
    return _period("eval_steps", Outcome("value", ("eval_steps",), 0, "off"))(key)


def _epochs(key: Key) -> Outcome | None:
    if get(key.tree, TOTAL, NUMBERS[TOTAL]) is None:
        return Outcome("renamed", ("data", "num_train_epochs"), key.value) if key.path[0] == "rollout" else None
    return Outcome("no effect", note="rollout.total_rollout_steps counts, unless the epochs end before")


def _partial(key: Key) -> Outcome:
    if key.value or max_staleness(key.tree) == 0:
        return Outcome("same", note="requests run through updates" if key.value else "synchronous")
    return Outcome("no counterpart", note="requests run through updates; verl lets them end first")


def _threshold(key: Key) -> Outcome:
    if not trainer(key.tree):
        return Outcome("no effect", note="of V1's asynchronous modes")
    mode = trainer(key.tree)
    if key.value - 1 < _warmup_batches(key.tree, mode):
        return Outcome("value", ("max_staleness",), max_staleness(key.tree), "counts the version in training, too")
    note = (
        "num_warmup_batches bounds admission; groups that take longer are trained (buffer.stale_policy), as those of verl "
        f"that lag up to {key.value - 1} versions"
    )
    return Outcome("no counterpart", note=note)


def _warmup(key: Key) -> Outcome:
    if key.path[2] != trainer(key.tree):
        return Outcome("no effect", note=f"of trainer_mode {key.path[2]}")
    return Outcome("value", ("max_staleness",), max_staleness(key.tree), "batches ahead")


def _mode(key: Key) -> Outcome:
    return Outcome("same", note="max_staleness" if trainer(key.tree) == key.value else "synchronous")


TRAINERS: Rules = (
    (STALENESS, _from_number(_staleness, "max_staleness")),
    (SYNC, _from_number(lambda key: Outcome("renamed", ("model_update_frequency",), key.value), "model_update_frequency")),
    (REQUIRED, _from_number(
        lambda key: Outcome("value", (*ARGS.split("."), "num_minibatches"), key.value, "optimizer steps per batch"),
        f"{ARGS}.num_minibatches")),
    (f"{ACTOR}.ppo_mini_batch_size", _fully_async(_from_number(_batch, "rollout_batch_size"))),
    ("data.train_batch_size", _fully_async(no_effect("the batch is ppo_mini_batch_size * require_batches"))),
    ("data.gen_batch_size", same("prompts are taken as slots are free", 1)),
    (TOTAL, _from_number(_total, "max_steps")),
    ("rollout|trainer.test_freq", _test_freq),
    ("trainer.save_freq", _period("save_steps", Outcome(
        "no counterpart", note="checkpoints are saved every save_steps, 20: runs resume from them"))),
    ("rollout|trainer.total_epochs", _fully_async(_epochs)),
    ("trainer.total_training_steps", _fully_async(no_effect("rollout.total_rollout_steps counts"))),
    ("async_training.partial_rollout", _partial),
    (OLD_KEYS[0], lambda key: Outcome("same", note="old_logprobs: recompute") if key.value
     else Outcome("value", ("old_logprobs",), "behavior")),
    (OLD_KEYS[1], same("old_logprobs", True)),
    ("async_training.use_trainer_do_validate", same("", False)),
    ("async_training.use_trainer_do_validate", missing("evaluations are on the engines, beside training")),
    ("async_training.use_dynamic_resource_scheduling", same("", False)),
    ("async_training.use_dynamic*|dynamic_*", missing("engines on the learner's devices: docs/devices.md")),
    ("async_training.concurrent_samples_per_replica", missing("train_env_manager.num_env_groups, of all engines")),
    ("async_training.checkpoint_engine.**", missing("weights.transport (docs/configuration.md)")),
    (f"{ROLLOUT}.checkpoint_engine.**", missing("weights.transport (docs/configuration.md)")),
    (f"{ACTOR}.use_rollout_log_probs", same("old_logprobs", True)),
    ("trainer.use_v1", same("max_staleness")),
    ("trainer.v1.trainer_mode", _mode),
    ("trainer.v1.separate_async.parameter_sync_step", same("num_minibatches: mini-batches of a batch")),
    ("trainer.v1.*.num_warmup_batches", _from_number(_warmup, "max_staleness")),
    (LIMIT, _from_number(_threshold, "max_staleness")),
    ("trainer.v1.sampler.max_off_policy_strategy", missing("groups that take long are trained: buffer.stale_policy")),
    ("trainer.v1.separate_async.hybrid_rollout.**", missing("engines on the learner's devices: docs/devices.md")),
    ("transfer_queue.**", missing("the buffer is Redis")),
)  # fmt: skip

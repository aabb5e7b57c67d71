"""Scripts that start verl's asynchronous trainers become asynchronous runs."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.importing.report import Imported, Outcome
from offbeat.deploy.config.importing.rules import get
from offbeat.deploy.config.importing.verl import import_verl

FULLY_ASYNC, ONE_STEP_OFF, MAIN = (
    "verl.experimental.fully_async_policy.fully_async_main",
    "verl.experimental.one_step_off_policy.main_ppo",
    "verl.trainer.main_ppo",
)
KNOWN = (
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.model.path=org/model",
    "data.train_files=a.parquet",
)
BATCH, SYNC, TOTAL = (
    ("data.train_batch_size=0", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "async_training.require_batches=2"),
    "async_training.trigger_parameter_sync_step",
    "rollout.total_rollout_steps",
)
STALENESS, LIMIT = "async_training.staleness_threshold", "trainer.v1.sampler.max_off_policy_threshold"
BYPASS, LOSS_MODE = "algorithm.rollout_correction.bypass_mode", "actor_rollout_ref.actor.policy_loss.loss_mode"


def load(folder: Path, module: str, *words: str, known: tuple[str, ...] = KNOWN) -> Imported:
    script = folder / "run.sh"
    script.write_text(f"python3 -m {module} \\\n    " + " \\\n    ".join((*known, *words)) + " $@\n")
    return import_verl(script)


def outcome(imported: Imported, key: str) -> Outcome:
    (found,) = [each.outcome for each in imported.keys if ".".join(each.key) == key]
    return found


def values(imported: Imported, *keys: str) -> list[Any]:
    return [get(imported.tree, key) for key in keys]


@pytest.mark.parametrize(
    ("threshold", "period", "expected"),
    [
        # verl samples at most (1 + threshold) * period batches between two updates of its engines
        (0, 1, 0),
        (0, 4, 3),
        (0.1, 4, 3.4),
        (0.5, 4, 5),
        (1, 1, 1),
        (0.6, 16, 24.6),
    ],
)
def test_the_bound_of_fully_async_main_is_in_versions(threshold: float, period: int, expected: float, tmp_path: Path):
    imported = load(tmp_path, FULLY_ASYNC, *BATCH, f"{STALENESS}={threshold}", f"{SYNC}={period}")
    assert values(imported, "max_staleness", "model_update_frequency") == [expected, period]
    assert get(imported.tree, "buffer.stale_policy") == ("train" if threshold else None)
    assert outcome(imported, STALENESS).note.startswith(f"in versions, one per step: (1 + {threshold}) x {period} - 1")
    assert not [issue for issue in imported.to_do if issue.path in ("max_staleness", "model_update_frequency")]


def test_a_batch_of_fully_async_main_is_of_its_mini_batches(tmp_path: Path):
    words = (*BATCH, f"{SYNC}=4", f"{TOTAL}=1000", "trainer.total_epochs=10", "async_training.partial_rollout=True")
    imported = load(tmp_path, FULLY_ASYNC, *words)
    batch = ("rollout_batch_size", "train_env_manager.num_env_groups", "actor_train.training_args.num_minibatches")
    assert values(imported, *batch) == [256, 64, 2]
    # 1000 prompts are 15 batches of 64, of which 12 are followed by an update of the engines
    assert values(imported, "max_steps", "data.num_train_epochs") == [12, None]
    assert outcome(imported, "data.train_batch_size").status == "no effect"
    assert outcome(imported, "trainer.total_epochs").status == "no effect"
    assert outcome(imported, "async_training.partial_rollout") == Outcome("same", note="requests run through updates")


@pytest.mark.parametrize("key", ["rollout.test_freq", "trainer.test_freq"])  # of verl 0.7, and 0.9
def test_periods_of_fully_async_main_count_updates_of_its_engines(key: str, tmp_path: Path):
    words = ("data.val_files=b.parquet", f"{SYNC}=4", "trainer.save_freq=20")
    imported = load(tmp_path, FULLY_ASYNC, *BATCH, *words, f"{key}=5")
    assert values(imported, "eval_steps", "save_steps", "max_ckpt_to_keep") == [20, 80, 1_000_000]
    imported = load(tmp_path, FULLY_ASYNC, *BATCH, *words, f"{key}=-1")
    assert get(imported.tree, "eval_steps") == 0


def test_a_warm_up_of_fully_async_main_is_a_share_of_its_updates(tmp_path: Path):
    words = (*BATCH, f"{SYNC}=4", f"{TOTAL}=25600", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1")
    imported = load(tmp_path, FULLY_ASYNC, *words)
    assert values(imported, "max_steps", "actor_train.training_args.warmup_steps") == [400, 10]


def test_fully_async_main_without_keys_has_its_own_defaults(tmp_path: Path):
    """Of `fully_async_ppo_trainer.yaml`."""
    imported = load(tmp_path, FULLY_ASYNC, f"{TOTAL}=51200")
    keys = ("max_staleness", "model_update_frequency", "rollout_batch_size", "max_steps", "old_logprobs")
    assert values(imported, *keys) == [3.4, 4, 1024, 200, "behavior"]
    assert get(imported.tree, "actor_train.training_args.num_minibatches") == 1


def test_rollouts_that_end_before_an_update_have_no_counterpart(tmp_path: Path):
    imported = load(tmp_path, FULLY_ASYNC, *BATCH, "async_training.partial_rollout=False")
    assert outcome(imported, "async_training.partial_rollout").status == "no counterpart"


def test_numbers_of_the_environment_are_to_be_set(tmp_path: Path):
    imported = load(tmp_path, FULLY_ASYNC, *BATCH, f"{STALENESS}=$LIMIT", f"{TOTAL}=$PROMPTS")
    assert outcome(imported, STALENESS) == Outcome("no counterpart", note="no number: set max_staleness")
    assert outcome(imported, TOTAL) == Outcome("no counterpart", note="no number: set max_steps")


@pytest.mark.parametrize(
    ("words", "old_logprobs", "ratio_type"),
    [
        ((), "behavior", None),  # the default of 0.9, whose bypass mode has PPO's loss
        ((f"{BYPASS}=False",), "recompute", "sequence"),
        (("async_training.use_rollout_log_probs=True",), "behavior", "sequence"),  # of 0.7
        (("async_training.compute_prox_log_prob=False",), "behavior", "sequence"),
        (("async_training.compute_prox_log_prob=True",), "recompute", "sequence"),
    ],
)
def test_the_ratio_of_fully_async_main(
    words: tuple[str, ...], old_logprobs: str, ratio_type: str | None, tmp_path: Path
):
    imported = load(tmp_path, FULLY_ASYNC, *BATCH, f"{LOSS_MODE}=gspo", *words)
    assert values(imported, "old_logprobs", "ratio_type") == [old_logprobs, ratio_type]


@pytest.mark.parametrize("module", [ONE_STEP_OFF, "recipe.one_step_off_policy.main_ppo"])
def test_one_step_off_policy_samples_a_batch_ahead(module: str, tmp_path: Path):
    imported = load(tmp_path, module, "data.train_batch_size=64", "trainer.test_freq=5", "data.val_files=b.parquet")
    keys = ("max_staleness", "buffer.order", "rollout_batch_size", "eval_steps", "old_logprobs")
    assert values(imported, *keys) == [1, "admission", 256, 5, "behavior"]
    assert get(imported.tree, "model_update_frequency") is None


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("defaults: [fully_async_ppo_trainer, _self_]", [3.4, 4, "behavior"]),
        (f"async_training: {{{STALENESS.partition('.')[2]}: 1}}", [7, 4, "behavior"]),
        ("defaults: [one_step_off_ppo_megatron_trainer, _self_]", [1, None, "behavior"]),
        ("defaults: [ppo_trainer, _self_]", [0, None, "recompute"]),
    ],
)
def test_the_trainer_of_a_file_is_that_of_its_defaults_or_keys(keys: str, expected: list[Any], tmp_path: Path):
    path = tmp_path / "own.yaml"
    path.write_text(f"{keys}\ndata: {{train_files: a.parquet}}\nactor_rollout_ref: {{rollout: {{n: 4}}}}\n")
    imported = import_verl(path)
    assert values(imported, "max_staleness", "model_update_frequency", "old_logprobs") == expected
    assert imported.remarks == ()


def test_a_path_named_like_a_trainer_is_none(tmp_path: Path):
    words = ("trainer.experiment_name=one_step_off_policy-main_ppo", "trainer.default_local_dir=/fully_async_main")
    assert get(load(tmp_path, MAIN, *words).tree, "max_staleness") == 0


@pytest.mark.parametrize(
    ("words", "ahead", "groups"),
    [
        ((), 1, 128),
        (("trainer.v1.separate_async.num_warmup_batches=2",), 2, 192),
        (("trainer.v1.separate_async.num_warmup_batches=0",), 0, 64),
        # a threshold counts the version in training: 2 is a lag of 1
        (("trainer.v1.separate_async.num_warmup_batches=3", f"{LIMIT}=2"), 1, 128),
    ],
)
def test_v1_samples_its_warm_up_batches_ahead(words: tuple[str, ...], ahead: int, groups: int, tmp_path: Path):
    sizes = ("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    mode = ("trainer.use_v1=True", "trainer.v1.trainer_mode=separate_async")
    imported = load(tmp_path, MAIN, *sizes, *mode, "trainer.v1.separate_async.parameter_sync_step=4", *words)
    keys = ("max_staleness", "train_env_manager.num_env_groups", "rollout_batch_size", "buffer.stale_policy")
    assert values(imported, *keys) == [ahead, groups, 256, "train" if ahead else None]
    assert values(imported, "actor_train.training_args.num_minibatches", "old_logprobs") == [4, "recompute"]


@pytest.mark.parametrize("words", [("trainer.v1.trainer_mode=sync",), ("trainer.use_v1=False",)])
def test_v1_without_an_asynchronous_mode_is_synchronous(words: tuple[str, ...], tmp_path: Path):
    mode = () if "sync" in words[0] else ("trainer.v1.trainer_mode=colocate_async",)
    imported = load(tmp_path, MAIN, *mode, *words, f"{LIMIT}=8", "trainer.v1.separate_async.num_warmup_batches=1")
    assert get(imported.tree, "max_staleness") == 0
    assert outcome(imported, LIMIT).status == "no effect"


def test_rewards_of_0_9_are_those_of_0_7(tmp_path: Path):
    overlong = "+reward.reward_kwargs.overlong_buffer_cfg"
    words = ("reward.reward_manager.name=dapo", f"{overlong}.enable=True", f"{overlong}.len=512",
             f"{overlong}.penalty_factor=0.5", "+reward.reward_kwargs.max_resp_len=2048",
             "data.max_response_length=2048")  # fmt: skip
    imported = load(tmp_path, FULLY_ASYNC, *BATCH, *words)
    shaping = {"overlong_max_length": 2048, "overlong_buffer": 512, "overlong_penalty": 0.5}
    assert get(imported.tree, "reward_shaping") == shaping
    assert outcome(imported, "reward.reward_manager.name").status == "same"

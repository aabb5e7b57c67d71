"""Scripts and YAML files of verl become ours, by the names, meanings and defaults of verl 0.7."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.report import KeyReport
from offbeat.deploy.config.importing.rules import get
from offbeat.deploy.config.importing.verl import import_verl, read_overrides, translate_verl

VERL = """#!/bin/bash
set -x
MODEL=org/model
export N=8
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/train.parquet \\
    data.train_batch_size=64 \\
    data.max_response_length=1024 \\
    actor_rollout_ref.model.path=${MODEL} \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    +actor_rollout_ref.rollout.n=${N:-5} \\
    trainer.total_training_steps=${STEPS:-20} \\
    trainer.total_epochs=15 \\
    trainer.logger='["console","tensorboard"]' $@
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def statuses(reports: list[KeyReport]) -> dict[str, str]:
    return {".".join(each.key): each.outcome.status for each in reports if each.key}


def test_a_script_of_verl_passes_its_variables():
    tree = read_overrides(VERL)
    assert tree["actor_rollout_ref"]["model"]["path"] == "org/model"
    assert tree["actor_rollout_ref"]["rollout"]["n"] == 8
    assert tree["trainer"] == {
        "total_training_steps": 20, "total_epochs": 15, "logger": ["console", "tensorboard"],
    }  # fmt: skip
    assert tree["data"]["train_files"] == "${oc.env:HOME}/train.parquet"  # of the environment


def test_a_script_of_verl_becomes_rlvr(tmp_path: Path):
    tree, reports, _ = translate_verl(write(tmp_path, "run.sh", VERL))
    assert (tree["pipeline"], tree["rollout_batch_size"], tree["sequence_length"]) == ("rlvr", 512, 1536)
    training: dict[str, Any] = tree["actor_train"]["training_args"]
    assert (training["learning_rate"], training["num_minibatches"], training["warmup_steps"]) == (1e-6, 4, 2)
    assert (tree["kl_loss_coef"], tree["kl_loss_type"]) == (0.001, "k3")
    assert tree["max_steps"] == 20
    found = statuses(reports)
    assert found["trainer.total_epochs"] == "no effect"
    assert len(found) == len(set(found)) == 15


def test_a_yaml_of_verl_is_read_too(tmp_path: Path):
    text = (
        "actor_rollout_ref: {actor: {ppo_epochs: 2}, rollout: {n: 4}}\nalgorithm: {adv_estimator: rloo}\n"
        "trainer: {project_name: p, experiment_name: a b, default_local_dir: 'out/${trainer.project_name}'}\n"
    )
    tree = import_verl(write(tmp_path, "ppo.yaml", text)).tree
    assert (tree["ppo_epochs"], tree["adv_estimator"]) == (2, "rloo")
    assert (tree["exp_name"], tree["output_dir"]) == ("a-b", "out/p")


def test_a_script_without_keys_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no `key=value` of verl"):
        translate_verl(write(tmp_path, "run.sh", "echo hello\n"))


def options(folder: Path, *words: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Import a script with these overrides; return our tree and the status of each key."""
    known = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.model.path=org/model")
    imported = import_verl(write(folder, "run.sh", f"python3 -m verl.trainer.main_ppo {' '.join((*known, *words))}"))
    return imported.tree, statuses(list(imported.keys))


def test_defaults_of_groups_choose_the_engine_and_own_ones_are_named(tmp_path: Path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "mine.yaml", "train_batch_size: 8")
    groups = "[actor@actor_rollout_ref.actor: megatron_actor, data@data: mine, _self_]"
    path = write(tmp_path, "mega.yaml", f"defaults: {groups}\nreward_model: null\ndata: {{train_files: a.parquet}}\n")
    assert list(import_verl(path).remarks) == ["defaults: the keys of data/mine are not read"]
    assert "decay_all_weights" not in import_verl(path).tree["actor_train"]["training_args"]


def test_a_script_without_keys_has_verls_defaults(tmp_path: Path):
    """Of `_generated_ppo_trainer.yaml`, where Offbeat's differ."""
    tree = import_verl(write(tmp_path, "run.sh", "python3 -m verl.trainer.main_ppo data.train_files=a.parquet")).tree
    expected = {
        "adv_estimator": "gae",
        "lambd": 1.0,
        "value_clip": 0.5,
        "dual_clip": 3.0,
        "loss_agg_mode": "token-mean",
        "rollout_batch_size": 1024,
        "actor_train.training_args.num_minibatches": 4,
        "actor_train.training_args.weight_decay": 0.01,
        "actor_train.training_args.decay_all_weights": True,
        "actor_train.training_args.adam_beta2": 0.999,
        "actor_infer.generating_args.max_new_tokens": 512,
        "critic.training_args.learning_rate": 1e-5,
        "val_env_manager.generating_args.temperature": 0.0,
        "val_env_manager.group_size": 1,
        "data.ground_truth_key": "reward_model.ground_truth",
        "data.num_train_epochs": 30,
    }
    # without validation rows its keys have no effect, and are left out
    present = {key: value for key, value in expected.items() if not key.startswith("val_")}
    assert {key: get(tree, key) for key in present} == present
    text = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet data.val_files=b.parquet"
    tree = import_verl(write(tmp_path, "run.sh", text)).tree
    assert {key: get(tree, key) for key in expected} == expected


@pytest.mark.parametrize("option", ["--config-name='multiturn'", "--config-path=conf --config-name $NAME"])
def test_a_file_that_a_script_names_is_read_below_its_overrides(option: str, tmp_path: Path):
    folder = tmp_path / ("conf" if "path" in option else "config")
    folder.mkdir()
    keys = "data: {max_response_length: 900, train_batch_size: 256}\nhydra: {searchpath: [x]}\n"
    write(folder, "multiturn.yaml", f"defaults: [ppo_trainer, mine, _self_]\n{keys}")
    script = f"NAME=multiturn.yaml\npython3 -m verl.trainer.main_ppo {option} data.train_batch_size=8"
    imported = import_verl(write(tmp_path, "run.sh", script))
    assert imported.tree["actor_infer"]["generating_args"]["max_new_tokens"] == 900
    assert imported.tree["train_env_manager"]["num_env_groups"] == 8
    assert len(imported.remarks) == 2
    assert str(folder / "multiturn.yaml") in imported.remarks[0]
    assert imported.remarks[1] == "defaults: the keys of mine are not read"
    (folder / "multiturn.yaml").unlink()
    (remark,) = import_verl(tmp_path / "run.sh").remarks
    assert remark.startswith("--config-name: no multiturn.yaml beside ")


@pytest.mark.parametrize(
    ("words", "decays"),
    [
        ("--config-name=ppo_trainer.yaml", True),
        ("--config-path=./config --config-name='ppo_megatron_trainer'", None),
        ("actor_rollout_ref.actor.strategy=megatron", None),
    ],
)
def test_megatron_spares_norms_and_biases(words: str, decays: bool | None, tmp_path: Path):
    script = f"python3 -m verl.trainer.main_ppo {words} data.train_files=a.parquet"
    imported = import_verl(write(tmp_path, "run.sh", script))
    args = imported.tree["actor_train"]["training_args"]
    assert (args["weight_decay"], args.get("decay_all_weights")) == (0.01, decays)
    assert imported.tree["actor_train"]["strategy_args"] == {"strategy_name": "fsdp2_train"}
    assert imported.remarks == ()


ACTOR, POLICY = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss.loss_mode"
CORRECTION = "algorithm.rollout_correction"
REWARD = {
    "name": "reward-model",
    "kind": "reward_model",
    "includes_thoughts": True,
    "model_args": {"model_name_or_path": "/m", "dtype": "bfloat16"},
}
"""verl's reward model reads the whole response, in bfloat16."""
OVERLONG = "+reward_model.reward_kwargs.overlong_buffer_cfg"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # verl's clip_ratio is read only where a bound is null, and both are 0.2 by default
        ((f"{ACTOR}.clip_ratio=0.1",), {"pg_clip": None, "pg_clip_low": None}),
        ((f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_high=0.28"), {"pg_clip_low": 0.1, "pg_clip_high": 0.28}),
        ((f"{ACTOR}.use_kl_loss=True",), {"use_kl_loss": True, "kl_loss_coef": 0.001}),
        (("algorithm.use_kl_in_reward=True",), {"init_kl_coef": 0.001}),
        (
            ("algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=low_var_kl", "algorithm.kl_ctrl.kl_coef=0.01"),
            {"init_kl_coef": 0.01, "kl_penalty": "k3"},
        ),
        (
            ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2"),
            {"target_kl": 0.2},
        ),
        (("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"), {"target_kl": 0.1, "init_kl_coef": 0.001}),
        (("algorithm.kl_ctrl.target_kl=0.2",), {"target_kl": None}),
        # `+` gives the loss the gradient of k2, and a reward has none
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=low_var_kl+"), {"kl_loss_type": "k2"}),
        (("algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=k3+"), {"kl_penalty": "k3", "add_token_level_kl": True}),
        # groups with equal rewards have no policy loss, but a KL and an entropy
        ((f"{ACTOR}.use_kl_loss=True",), {"zero_variance": "train"}),
        ((f"{ACTOR}.entropy_coeff=0.001",), {"zero_variance": "train"}),
        ((f"{ACTOR}.entropy_coeff=0",), {"zero_variance": None}),
        # and count in whitening
        (("algorithm.adv_estimator=reinforce_plus_plus_baseline",), {"zero_variance": "train"}),
        # all checkpoints are kept, of those that verl saves
        (("trainer.save_freq=5",), {"save_steps": 5, "max_ckpt_to_keep": 1_000_000}),
        (("trainer.save_freq=5", "trainer.max_actor_ckpt_to_keep=null"), {"max_ckpt_to_keep": 1_000_000}),
        (("trainer.save_freq=5", "trainer.max_actor_ckpt_to_keep=3"), {"max_ckpt_to_keep": 3}),
        (("trainer.save_freq=-1",), {"max_ckpt_to_keep": None}),
        # verl whitens what the critic estimates, and discounts for two estimators alone
        (("algorithm.adv_estimator=gae", "algorithm.gamma=0.99"), {"whiten_advantages": True, "gamma": 0.99}),
        (("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=True"), {"zero_variance": None}),
        (("algorithm.gamma=0.99",), {"gamma": None, "whiten_advantages": None}),
        (("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.99"), {"gamma": 0.99}),
        ((f"{POLICY}=gspo", "algorithm.adv_estimator=gae"), {"ratio_type": "sequence-token"}),
        ((f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0"), {"use_kl_loss": None, "kl_loss_coef": None}),
        (("data.val_files=b.parquet",), {"eval_steps": 0}),
        (("data.val_files=b.parquet", "trainer.test_freq=5"), {"eval_steps": 5}),
        # one response is compared with none
        (("actor_rollout_ref.rollout.n=1",), {"adv_estimator": "reinforce"}),
        (
            ("actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus_baseline"),
            {"adv_estimator": "reinforce_plus_plus"},
        ),
        (("algorithm.adv_estimator=gpg", f"{POLICY}=gpg"), {"adv_estimator": "dr_grpo", "pg_variant": "gpg"}),
        ((f"{POLICY}=gpg",), {"adv_estimator": "grpo", "pg_variant": "vanilla"}),
        (("algorithm.adv_estimator=optimal_token_baseline",), {"adv_estimator": "grpo"}),
        ((f"{CORRECTION}.bypass_mode=true", f"{POLICY}=gspo"), {"ratio_type": None, "loss_agg_mode": "token-mean"}),
        ((), {"actor_train.model_args.dtype": "bfloat16", "actor_train.strategy_args.strategy_name": "fsdp2_train"}),
        (
            (f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.min_lr_ratio=0.1"),
            {
                "actor_train.training_args.lr_scheduler_type": "cosine_with_min_lr",
                "actor_train.training_args.lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            },
        ),
        ((f"{ACTOR}.ppo_micro_batch_size=64", "trainer.nnodes=2"),
         {"actor_train.training_args.per_device_train_batch_size": 4}),
        ((f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",), {"actor_train.training_args.per_device_train_batch_size": 4}),
        (
            ("actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.target_modules='[linear_qkv]'"),
            {
                "actor_train.model_args.lora_rank": 8,
                "actor_train.model_args.lora_alpha": 32,
                "actor_train.model_args.lora_target": "q_proj,k_proj,v_proj",
            },
        ),
        (
            (f"{POLICY}=gspo", f"{ACTOR}.clip_ratio_low=0.0003", f"{ACTOR}.loss_agg_mode=token-mean"),
            {
                "ratio_type": "sequence",
                "pg_clip_low": 0.0003,
                "loss_agg_mode": "seq-mean-token-mean",
                "dual_clip": None,
            },
        ),
        (
            (f"{POLICY}=sapo", f"{ACTOR}.tau_neg=1.2"),
            {"pg_variant": "sapo", "sapo_temperature_neg": 1.2, "loss_agg_mode": "seq-mean-token-mean"},
        ),
        (
            (f"{POLICY}=cispo", f"{ACTOR}.clip_ratio_high=0.3"),
            {"pg_variant": "cispo", "cispo_epsilon_low": 0.2, "cispo_epsilon_high": 0.3},
        ),
        (
            (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=900"),
            {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_agg_length": 900},
        ),
        (
            (f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_threshold=4.0"),
            {"train_infer_correction": {"is_weight": {"weight_type": "sequence", "upper_bound": 4.0}}},
        ),
        (
            (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.bypass_mode=True"),
            {"old_logprobs": "behavior", "train_infer_correction": None},
        ),
        (
            (f"{OVERLONG}.enable=True", f"{OVERLONG}.len=512", f"{OVERLONG}.penalty_factor=0.5",
             "+reward_model.reward_kwargs.max_resp_len=2048", "data.max_response_length=2048"),
            {"reward_shaping": {"overlong_max_length": 2048, "overlong_buffer": 512, "overlong_penalty": 0.5}},
        ),
        ((f"{OVERLONG}.enable=False", f"{OVERLONG}.len=512"), {"reward_shaping": None}),
        (
            ("reward_model.enable=True", "reward_model.model.path=/m"),
            {"rewards": [REWARD]},
        ),
        (
            (
                "reward_model.enable=True",
                "reward_model.model.path=/m",
                "reward_model.max_length=512",
                "reward_model.use_dynamic_bsz=True",
                "reward_model.forward_max_token_len_per_gpu=8192",
            ),
            {"rewards": [REWARD | {"max_length": 512, "max_batch_tokens": 8192}]},
        ),
        (
            ("reward_model.enable=False", "reward_model.model.path=/m", "reward_model.max_length=512"),
            {"rewards": None},
        ),
        (("critic.optim.lr=1e-4",), {"critic": None}),  # grpo has no critic
        (
            ("actor_rollout_ref.model.lora_rank=32",),
            {
                "actor_train.model_args.lora_rank": 32,
                "actor_train.model_args.lora_alpha": 16,
                "actor_train.model_args.lora_target": "all-linear",
                "actor_train.training_args.learning_rate": 1e-6,
            },
        ),
        (("actor_rollout_ref.model.lora_alpha=32",), {"actor_train.model_args.lora_alpha": None}),
        (
            ("actor_rollout_ref.model.lora_adapter_path=/adapters/sft", "actor_rollout_ref.model.lora_rank=32"),
            {
                "actor_train.model_args.adapter_name_or_path": "/adapters/sft",
                "actor_train.model_args.lora_rank": None,
                "actor_train.model_args.lora_alpha": None,
                "actor_train.model_args.lora_target": None,
                "actor_train.training_args.learning_rate": 1e-6,
            },
        ),
        (("algorithm.adv_estimator=grpo_vectorized",), {"adv_estimator": "grpo"}),
        (
            ("+actor_rollout_ref.rollout.stop=['</search>','</answer>']",),
            {"actor_infer.generating_args.stop_strings": ["</search>", "</answer>"]},
        ),
        (("trainer.experiment_name=x_$(date)",), {"exp_name": "x_-date"}),
        (
            (f"{ACTOR}.router_replay.mode=R3", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"),
            {"router_replay": True},
        ),
        (
            ("global_profiler.tool=torch_memory", "global_profiler.steps=[1,2]"),
            {"profiler_memory": True, "profiler_timeline": None, "profiler_steps": [1, 2]},
        ),
    ],
)  # fmt: skip
def test_an_option_of_verl(words: tuple[str, ...], expected: dict[str, Any], tmp_path: Path):
    mini = f"{ACTOR}.ppo_mini_batch_size=64"  # several optimizer steps per batch, without which clips have no effect
    tree, _ = options(tmp_path, "data.train_batch_size=256", mini, "data.train_files=a.parquet", *words)
    assert {key: get(tree, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("word", "status"),
    [
        (f"{POLICY}=clip_cov", "no counterpart"),
        ("algorithm.adv_estimator=grpo_passk", "no counterpart"),
        ("data.truncation=left", "no counterpart"),
        ("data.truncation=error", "same"),
        ("critic.ppo_epochs=2", "no effect"),
        ("trainer.save_freq=-1", "no counterpart"),
        ("trainer.save_freq=5", "renamed"),
        ("trainer.val_before_train=False", "no counterpart"),
        (f"{ACTOR}.router_replay.mode=R2", "no counterpart"),
        (f"{ACTOR}.router_replay.mode=disabled", "same"),
        ("trainer.val_only=True", "no counterpart"),
        ("trainer.val_only=False", "same"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4", "no effect"),
        ("trainer.resume_from_path=folder", "no effect"),
        (f"{ACTOR}.ppo_micro_batch_size=$SIZE", "no counterpart"),
        (f"{ACTOR}.optim.min_lr_ratio=0.1", "no effect"),  # of a constant schedule
        (f"{ACTOR}.kl_loss_type=kl", "no effect"),  # without use_kl_loss
        (f"{CORRECTION}.rollout_rs=token_k1", "no counterpart"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=2", "no counterpart"),
        ("actor_rollout_ref.model.lora_rank=$RANK", "no counterpart"),
        ("critic.optim.lr=1e-4", "no effect"),
        (f"{ACTOR}.clip_ratio=0.1", "no effect"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", "same"),
        ("trainer.resume_mode=auto", "same"),
        ("global_profiler.tool=torch", "no effect"),  # without steps
        ("global_profiler.tool=nsys global_profiler.steps=[2]", "no counterpart"),
        ("global_profiler.save_path=profiles", "no counterpart"),
    ],
)
def test_what_becomes_of_a_key_without_a_counterpart(word: str, status: str, tmp_path: Path):
    words = () if word.startswith("algorithm.adv") else ("algorithm.adv_estimator=grpo",)
    text = f"python3 -m verl.trainer.main_ppo {' '.join((*words, word))}"
    _, reports, _ = translate_verl(write(tmp_path, "run.sh", text))
    assert statuses(reports)[word.partition("=")[0]] == status


def test_arguments_of_vllm_that_follow_from_other_keys_are_left_out(tmp_path: Path):
    """A run is refused them. What agrees with the policy stays."""
    vllm = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    arguments = f"{vllm}.seed=7 {vllm}.dtype=bfloat16 {vllm}.skip_tokenizer_init=true {vllm}.swap_space=1"
    imported = import_verl(write(tmp_path, "run.sh", VERL.replace(" $@", f" {arguments}")))
    assert imported.tree["actor_infer"]["strategy_args"]["strategy_config"].keys() == {"dtype", "swap_space"}
    outcomes = {each.key[-1]: each.outcome for each in imported.keys if "engine_kwargs" in each.key}
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "seed": "no counterpart", "dtype": "renamed", "skip_tokenizer_init": "no counterpart", "swap_space": "renamed",
    }  # fmt: skip
    assert outcomes["seed"].note == "overrides what follows from seed: leave it out, or set that"


def test_arithmetic_of_a_script_is_calculated():
    script = (
        "prompt=$((1024 * 2))\nresponse=$((1024 * 8))\nn=$(((prompt + response) * 3 / 2))\n"
        "python3 -m verl.trainer.main_ppo data.max_prompt_length=$((prompt)) data.max_response_length=${response} "
        "data.x=${n} data.y=$((${prompt} + 1)) data.z=$((NOT_SET * 2))\n"
    )
    assert read_overrides(script)["data"] == {
        "max_prompt_length": 2048, "max_response_length": 8192, "x": 15360, "y": 2049, "z": "$((NOT_SET*2))",
    }  # fmt: skip


@pytest.mark.parametrize(("epochs", "status"), [(1, "same"), (2, "no counterpart")])
def test_a_critic_of_other_epochs_than_the_policys_is_reported(epochs: int, status: str, tmp_path: Path):
    _, found = options(tmp_path, "algorithm.adv_estimator=gae", f"critic.ppo_epochs={epochs}")
    assert found["critic.ppo_epochs"] == status


def test_defaults_of_variables_are_nested_and_the_last_value_of_a_key_counts():
    """As a shell and Hydra read them."""
    script = (
        "ID=org/model  # don't\nPLACE=${PLACE:-${HOME}/models/${ID}}\nN=${N:-$(nproc)}\n"
        "python3 -m verl.trainer.main_ppo a.path=$PLACE a.base=${ID##*/} a.n=1 a.empty=${NONE:-} a.n=2"
    )
    assert read_overrides(script)["a"] == {
        "path": "${oc.env:HOME}/models/org/model", "base": "${ID##*/}", "empty": None, "n": 2,
    }  # fmt: skip


def test_lists_of_variables_of_the_environment_stay_lists():
    words = "data.train_files=[$HOME/a,${HOME}/b] trainer.logger=[console,$LOGGER] +x.y={a:$HOME/c}"
    tree = read_overrides(f"python3 -m verl.trainer.main_ppo {words}")
    assert tree["data"]["train_files"] == ["${oc.env:HOME}/a", "${oc.env:HOME}/b"]
    assert tree["trainer"]["logger"] == ["console", "${oc.env:LOGGER}"]


@pytest.mark.parametrize("text", ["data: {~: x}", "data: {train_files: !!timestamp 2026-01-01}"])
def test_what_hydra_can_not_hold_is_refused(text: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"Incompatible key|not a supported"):
        import_verl(write(tmp_path, "own.yaml", text))


def test_a_price_is_not_unresolved(tmp_path: Path):
    imported = import_verl(write(tmp_path, "own.yaml", "data: {train_files: 'at $5, $(2^n)$'}"))
    assert not [issue for issue in imported.to_do if "not resolved" in issue.message]


def test_an_override_below_a_null_of_the_file_counts(tmp_path: Path):
    (tmp_path / "config").mkdir()
    write(tmp_path / "config", "own.yaml", "data: null\ntrainer: {total_epochs: 3}\n")
    script = "python3 -m verl.trainer.main_ppo --config-name=own data.train_files=a.parquet data.max_response_length=99"
    tree = import_verl(write(tmp_path, "run.sh", script)).tree
    assert tree["actor_infer"]["generating_args"]["max_new_tokens"] == 99


@pytest.mark.parametrize("key", ["ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"])
def test_devices_that_share_a_sequence_share_its_budget_of_tokens(key: str, tmp_path: Path):
    actor = "actor_rollout_ref.actor"
    settings = f"{actor}.use_dynamic_bsz=True {actor}.ppo_max_token_len_per_gpu=4000 {actor}.{key}=4 critic.{key}=2"
    script = VERL.replace(" $@", f" {settings}")
    tree, reports, _ = translate_verl(write(tmp_path, "run.sh", script))
    assert tree["actor_train"]["strategy_args"] == {"strategy_name": "fsdp2_train", "ulysses_size": 4}
    assert tree["actor_train"]["training_args"]["max_tokens_per_microbatch"] == 16000
    assert statuses(reports)[f"{actor}.{key}"] == "renamed"

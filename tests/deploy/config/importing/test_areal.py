"""Experiments of AReaL 2.0 become ours, by the names, meanings and defaults of its `areal/api/cli_args.py`."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.cli.config_import import import_files
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.areal import import_areal
from offbeat.deploy.config.importing.areal_batches import Backend, parse_backend
from offbeat.deploy.config.importing.report import Imported
from offbeat.deploy.config.importing.rules import get
from offbeat.deploy.config.loader import validate_tree

GRPO = """
experiment_name: gsm8k-grpo
trial_name: trial0
seed: 1
total_train_epochs: 10
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: /tmp/areal/experiments, name_resolve: {type: nfs}}
rollout:
  backend: "sglang:d4p1t1"
  experiment_name: ${experiment_name}
  max_concurrent_rollouts: 256
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
  scheduling_spec: ${actor.scheduling_spec}
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, greedy: false, temperature: 1.0}
actor:
  backend: "fsdp:d4p1t1"
  path: Qwen/Qwen2.5-1.5B-Instruct
  gradient_checkpointing: true
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer: {type: adam, lr: 1.70e-5, weight_decay: 0.017, beta2: 0.999, eps: 1e-8, lr_scheduler_type: constant}
  eps_clip: 0.4
  temperature: ${gconfig.temperature}
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  rejection_sampling: {metric: ratio, upper: 5.0}
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
  scheduling_spec: [{task_type: worker, gpu: 1}]
ref: {backend: "${actor.backend}", path: "${actor.path}"}
sglang: {model_path: "${actor.path}", context_length: 32768, mem_fraction_static: 0.8}
vllm: {model: "${actor.path}", max_model_len: 32768}
train_dataset: {batch_size: 256, shuffle: true, path: openai/gsm8k, type: rl, max_length: 1024}
valid_dataset: {batch_size: 256, path: openai/gsm8k, type: rl}
saver: {freq_epochs: 1, freq_steps: null}
evaluator: {freq_epochs: 1}
stats_logger: {wandb: {mode: disabled}}
"""
"""Of `examples/math/gsm8k_grpo.yaml`."""
ACTOR = "actor: {path: org/model}\ntrain_dataset: {path: a.jsonl, batch_size: 8, type: rl}\n"
REWARDS = [{"name": "answer", "kind": "math_rule"}]


def convert(folder: Path, text: str) -> Imported:
    path = folder / "config.yaml"
    path.write_text(text)
    return import_areal(path)


def with_actor(folder: Path, keys: str, others: str = "") -> Imported:
    """Import an experiment with these keys of the actor, and others."""
    text = f"train_dataset: {{path: a.jsonl, batch_size: 8, type: rl}}\n{others}"
    return convert(folder, f"actor: {{path: org/model, {keys}}}\n{text}")


def outcomes(imported: Imported) -> dict[str, tuple[str, str]]:
    return {".".join(each.key): (each.outcome.status, each.outcome.note) for each in imported.keys if each.key}


def test_an_experiment_trains_as_areal_does(tmp_path: Path):
    imported = convert(tmp_path, GRPO)
    expected: dict[str, Any] = {
        "pipeline": "rlvr",
        "exp_name": "gsm8k-grpo-trial0",
        "output_dir": "/tmp/areal/experiments/gsm8k-grpo/trial0",
        "pretrain": "Qwen/Qwen2.5-1.5B-Instruct",
        "rollout_batch_size": 1024,  # responses to 256 prompts
        "sequence_length": 2048,
        "train_env_manager": {"group_size": 4, "num_env_groups": 256},
        "max_staleness": 2,
        "buffer": {"stale_policy": "train"},
        "adv_estimator": "grpo",
        "whiten_advantages": True,
        "zero_variance": "train",
        "old_logprobs": "recompute",
        "train_infer_correction": {
            "is_weight": {"weight_type": "token", "upper_bound": 5.0},
            "filters": [{"agg_type": "token", "ratio_high": 5.0}],
        },
        "data": {
            "num_train_epochs": 10, "shuffle": True, "dataset_name": "openai/gsm8k:main", "prompt_length": 1024,
            "val_dataset_name": "openai/gsm8k:main", "prompt_key": "question", "ground_truth_key": "answer",
        },
        "custom_envs.prompt": {
            "env_type": "prompt", "max_steps": 1, "max_tokens_per_step": 1024,
            "agent_template": "{observation}\nPlease put your final answer within \\boxed{}.",
        },
        "actor_infer.strategy_args": {
            "strategy_name": "sglang",
            "strategy_config": {"max_model_len": 32768, "gpu_memory_utilization": 0.8},
        },
        "actor_infer.device_mapping": [0, 1, 2, 3],
        "actor_train.device_mapping": [4, 5, 6, 7],
        "actor_train.training_args.num_minibatches": 1,
        "actor_train.training_args.decay_all_weights": True,
    }  # fmt: skip
    assert {key: get(imported.tree, key) for key in expected} == expected
    found = outcomes(imported)
    assert found["actor.reward_scaling"] == ("no effect", "normalization divides it out")
    assert found["actor.reward_bias"] == ("no effect", "normalization subtracts it")
    assert found["actor.eps_clip"][0] == "no effect"  # the ratio is 1 in one optimizer step
    assert found["seed"][0] == "same"
    assert found["vllm.max_model_len"] == ("no effect", "engines are sglang's")
    validate_tree(imported.tree | {"rewards": REWARDS})


def test_an_experiment_without_keys_has_areals_defaults(tmp_path: Path):
    tree = convert(tmp_path, ACTOR).tree
    expected: dict[str, Any] = {
        "rollout_batch_size": 8,
        "adv_estimator": "reinforce",
        "old_logprobs": "behavior",
        "max_staleness": 0,
        "buffer": None,
        "data.num_train_epochs": 1,
        "sequence_length": 17408,
        "custom_envs.prompt.max_tokens_per_step": 16384,
        "actor_train.training_args": {
            "learning_rate": 1e-3, "adam_beta2": 0.999, "weight_decay": 0.01, "decay_all_weights": True,
            "num_minibatches": 4,
        },
        "actor_train.model_args": {"dtype": "bfloat16"},
    }  # fmt: skip
    assert {key: get(tree, key) for key in expected} == expected
    validate_tree(tree | {"rewards": REWARDS})


GROUP = "reward_norm: {mean_level: group, std_level: %s, group_size: 4}"


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        (GROUP % "group", "adv_estimator", "grpo"),
        (GROUP % "null", "adv_estimator", "dr_grpo"),
        (GROUP.replace("mean_level", "mean_leave1out: true, mean_level") % "null", "adv_estimator", "rloo"),
        (GROUP % "batch", "reward_normalization", {"norm_mean_type": "group", "norm_std_type": "batch"}),
        (GROUP % "batch", "adv_estimator", "reinforce"),
        ("reward_norm: {mean_level: batch, std_level: batch}", "reward_normalization",
         {"norm_mean_type": "batch", "norm_std_type": "batch"}),
        ("reward_norm: null", "reward_normalization", None),
        ("adv_norm: null", "whiten_advantages", None),
        ("ppo_n_minibatches: 2, eps_clip: 0.2, eps_clip_higher: 0.28", "pg_clip_low", 0.2),
        ("ppo_n_minibatches: 2, c_clip: 3.0", "dual_clip", 3.0),
        ("ppo_n_minibatches: 2, importance_sampling_level: sequence", "ratio_type", "sequence"),
        ("ppo_n_minibatches: 2, use_sapo_loss: true, sapo_tau_pos: 2.0", "sapo_temperature_pos", 2.0),
        ("recompute_logprob: true", "old_logprobs", "recompute"),
        ("use_decoupled_loss: true, prox_logp_method: loglinear", "old_logprobs", "loglinear"),
        ("use_decoupled_loss: true, m2_threshold: 0.04", "train_infer_correction", {"m2_threshold": 0.04}),
        ("use_decoupled_loss: true, rejection_sampling: {}", "train_infer_correction.filters",
         [{"agg_type": "token", "ratio_high": 5.0}]),
        ("reward_norm: {}", "reward_normalization", {"norm_mean_type": "batch", "norm_std_type": "batch"}),
        ("rejection_sampling: {upper: 5.0}", "train_infer_correction", None),  # without a decoupled loss
        ("use_decoupled_loss: true, rejection_sampling: {action: clamp, upper: 2.0, lower: 0.5}", "train_infer_correction",
         {"is_weight": {"weight_type": "token", "upper_bound": 2.0, "lower_bound": 0.5}}),
        ("use_decoupled_loss: true, rejection_sampling: {level: sequence, upper: 2.0}", "train_infer_correction",
         {"is_weight": {"weight_type": "geometric", "upper_bound": 2.0},
          "filters": [{"agg_type": "geometric", "ratio_high": 2.0}]}),
        ("use_decoupled_loss: true, rejection_sampling: {metric: kl_k3, upper: 1.0}", "train_infer_correction", None),
        ("use_decoupled_loss: true, behave_imp_weight_cap: 5.0", "train_infer_correction.filters",
         [{"agg_type": "token", "ratio_high": 5.0}]),
        ("overlong_reward_penalty: true, overlong_tokens: 512, overlong_penalty_factor: 1.0, max_new_tokens: 4096",
         "reward_shaping", {"overlong_max_length": 4096, "overlong_buffer": 512, "overlong_penalty": 1.0}),
        ("discount: 0.9", "gamma", 0.9),
        ("use_lora: true", "actor_train.model_args",
         {"dtype": "bfloat16", "lora_rank": 32, "lora_alpha": 16, "lora_target": "all-linear"}),
        ("use_lora: true, target_modules: [linear_qkv]", "actor_train.model_args.lora_target", "q_proj,k_proj,v_proj"),
        ("enable_tree_training: true", "actor_train.model_args.shared_prefix", True),
        ("optimizer: {lr_scheduler_type: cosine, min_lr_ratio: 0.1}", "actor_train.training_args.lr_scheduler_kwargs",
         {"min_lr_rate": 0.1}),
    ],
)  # fmt: skip
def test_an_option_of_the_actor(keys: str, key: str, expected: object, tmp_path: Path):
    tree = with_actor(
        tmp_path, keys, "gconfig: {n_samples: 4, max_new_tokens: 4096}\nrollout: {max_head_offpolicyness: 2}\n"
    ).tree
    assert get(tree, key) == expected
    validate_tree(tree | {"rewards": REWARDS})


@pytest.mark.parametrize(
    ("keys", "key", "expected"),
    [
        ("total_train_steps: 100", "max_steps", 100),
        ("total_train_steps: 100", "data", {"dataset_name": "a.jsonl"}),
        ("gconfig: {max_new_tokens: 2048, max_tokens: 2048}", "custom_envs.prompt.max_tokens_per_step", 2047),
        ("gconfig: {top_k: 100000000, stop: ['</a>']}", "actor_infer.generating_args",
         {"stop_strings": ["</a>"], "max_new_tokens": 16384}),
        ("rollout: {max_concurrent_rollouts: 4}", "train_env_manager.num_env_groups", 8),  # at least a batch
        ("rollout: {backend: 'vllm:d2t2p1', max_concurrent_rollouts: 16}", "actor_infer.device_mapping", [0, 1, 2, 3]),
        ("allocation_mode: 'vllm:d1t2+d2p1t1c2'", "actor_train.strategy_args",
         {"strategy_name": "fsdp2_train", "ulysses_size": 2}),
        ("allocation_mode: 'vllm:d1t2+d2p1t1c2'", "actor_train.device_mapping", [2, 3, 4, 5]),
        ("allocation_mode: 'vllm:d2|d2'", "actor_train.device_mapping", [0, 1]),
        ("dynamic_bs: true", "zero_variance", "mask"),
        ("evaluator: {freq_steps: 10}\nvalid_dataset: {path: b.jsonl}", "eval_steps", 10),
        ("valid_dataset: {path: b.jsonl}", "eval_steps", 0),
        ("valid_dataset: {path: b.jsonl}\neval_gconfig: {n_samples: 2, temperature: 0.6}", "val_env_manager",
         {"group_size": 2, "generating_args": {"temperature": 0.6}}),
        ("saver: {freq_steps: 5}", "max_ckpt_to_keep", 1_000_000),
        ("stats_logger: {wandb: {mode: online, project: p}}", "tracker_kwargs", {"wandb": {"project": "p"}}),
        ("stats_logger: {wandb: {mode: online}, tensorboard: {path: x}}", "track_with", ["wandb", "tensorboard"]),
        ("teacher: {path: org/teacher, rl_loss_weight: 1.0, distill_loss_weight: 0.01}", "teacher",
         {"teacher": {"model_args": {"model_name_or_path": "org/teacher"}, "opd_kl_coef": 0.01}}),
        ("teacher: {path: org/teacher, rl_loss_weight: 0}", "adv_estimator", "opd"),
    ],
)  # fmt: skip
def test_an_option_of_the_experiment(keys: str, key: str, expected: object, tmp_path: Path):
    tree = convert(tmp_path, f"{ACTOR}{keys}\n").tree
    assert get(tree, key) == expected
    validate_tree(tree | ({} if tree["adv_estimator"] == "opd" else {"rewards": REWARDS}))


def test_a_kl_needs_a_reference(tmp_path: Path):
    imported = with_actor(tmp_path, "kl_ctl: 0.05, kl_estimator: k2", "ref: {path: org/other}\n")
    assert (imported.tree["init_kl_coef"], imported.tree["kl_penalty"]) == (0.05, "k2")
    assert imported.tree["reference"] == {"model_args": {"model_name_or_path": "org/other"}}
    alone = with_actor(tmp_path, "kl_ctl: 0.05")
    assert "init_kl_coef" not in alone.tree
    assert outcomes(alone)["actor.kl_ctl"][0] == "no counterpart"


def test_a_critic_makes_gae(tmp_path: Path):
    critic = "critic: {path: '${actor.path}', is_critic: true, eps_clip: 0.4, optimizer: {lr: 1e-5}}\n"
    tree = with_actor(tmp_path, "ppo_n_minibatches: 2, reward_scaling: 5.0", critic).tree
    assert (tree["adv_estimator"], tree["lambd"], tree["value_clip"]) == ("gae", 1.0, 0.4)
    assert float(tree["critic"]["training_args"]["learning_rate"]) == 1e-5


@pytest.mark.parametrize(
    ("kind", "pipeline", "batch"), [("sft", "sft", 16), ("rw", "reward_model", 32), ("dpo", "dpo", 32)]
)
def test_rows_become_their_pipeline(kind: str, pipeline: str, batch: int, tmp_path: Path):
    text = f"""
actor: {{path: org/model, backend: "fsdp:d2", optimizer: {{lr: 2.0e-5}}, is_critic: {str(kind == "rw").lower()}}}
train_dataset: {{path: a.jsonl, batch_size: 16, type: {kind}, max_length: 2048}}
total_train_epochs: 3
"""
    imported = convert(tmp_path, text)
    tree = imported.tree
    assert (tree["pipeline"], tree["rollout_batch_size"], tree["sequence_length"]) == (pipeline, batch, 2048)
    assert tree["data"]["num_train_epochs"] == 3
    assert "actor_infer" not in tree
    validate_tree(tree)


@pytest.mark.parametrize("backend", ["megatron:d1t2p2", "megatron:(attn:d1p4t8|ffn:d1p4t1e8)"])
def test_megatrons_optimizer_spares_norms_and_biases(backend: str, tmp_path: Path):
    tree = with_actor(tmp_path, f"backend: '{backend}'").tree
    assert "decay_all_weights" not in tree["actor_train"]["training_args"]


def test_keys_of_a_script_are_named_as_its_own(tmp_path: Path):
    imported = convert(tmp_path, f"{ACTOR}econfig: {{domain: airline}}\nworkflow: a.b.C\n")
    assert outcomes(imported)["econfig.domain"][1].startswith("of the script's own workflow")
    assert any("in the script's Python" in remark for remark in imported.remarks)


def test_an_interpolation_without_a_key_is_left_out(tmp_path: Path):
    """As in `examples/openai_agents/config.yaml`."""
    imported = convert(tmp_path, ACTOR.replace("org/model", "org/model, max_new_tokens: '${gconfig.max_new_tokens}'"))
    assert any(remark.startswith("actor.max_new_tokens: ") for remark in imported.remarks)


def test_a_trial_is_valid_on_a_cpu_once_rewards_are_named(tmp_path: Path):
    path, rows = tmp_path / "grpo.yaml", tmp_path / "gsm8k.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    path.write_text(GRPO.replace("openai/gsm8k", str(rows)))
    lines = list[str]()
    import_files("areal", [path], tmp_path / "out.yaml", force=False, trial=True, echo=lines.append)
    left = "\n".join(lines).partition("to fill in before it validates:")[2]
    assert left.strip().splitlines() == [
        "rewards: nothing scores the answers: name at least one reward, such as {name: answer, kind: math_rule}"
    ]


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("fsdp:d4p1t1", Backend("fsdp", 4)),
        ("sglang:d2t4", Backend("sglang", 2, 4)),
        ("megatron:d1t2p4c2e8", Backend("megatron", 1, 2, 4, 2)),
        ("d2c2", Backend("", 2, context=2)),
        ("megatron:(attn:d1|ffn:d1)", None),
        (None, None),
    ],
)
def test_a_backend_has_sizes(text: str | None, backend: Backend | None):
    assert parse_backend(text) == backend


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no experiment of AReaL"):
        convert(tmp_path, "resources: {accelerators: A100}\nrun: python a.py\n")


def test_an_interpolation_that_can_not_be_left_out_is_named(tmp_path: Path):
    """A key with a dot is not found again by its path."""
    with pytest.raises(ConfigError, match=r"^actor\.a\.b: [^\n]*nope[^\n]*: name a key, or leave it out$"):
        convert(tmp_path, ACTOR.replace("org/model", "org/model, 'a.b': '${nope}'"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ACTOR.replace("type: rl", "type: [1]"), r"^train_dataset\.type: must be one of rl, sft, rw, dpo, not \[1\]"),
        (ACTOR.replace("org/model", "m, use_decoupled_loss: true, rejection_sampling: {upper: x}"),
         r"^actor\.rejection_sampling\.upper: must be a number, not 'x'"),
        (ACTOR.replace("org/model", "m, use_decoupled_loss: true, rejection_sampling: {upper: null}"),
         r"^actor\.rejection_sampling\.upper: must be a number, not None"),
        (ACTOR.replace("org/model", "m, optimizer: {eps: x}"), r"^actor\.optimizer\.eps: must be a number, not 'x'"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_named(text: str, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path, text)

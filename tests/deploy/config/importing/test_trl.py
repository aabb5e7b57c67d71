"""Configurations of TRL become ours, by the names and defaults of its documentation."""

from pathlib import Path

import pytest
import yaml

from offbeat.deploy.config.importing.fitting import check_imported
from offbeat.deploy.config.importing.report import KeyReport
from offbeat.deploy.config.importing.trl import import_trl, translate_trl
from offbeat.deploy.config.importing.trl_commands import NAME, find_command
from offbeat.deploy.config.loader import validate_tree

SFT = """
model_name_or_path: org/model
dataset_name: rows.jsonl
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
max_length: 2048
bf16: true
use_peft: true
lora_r: 32
use_rslora: true
report_to: [tensorboard]
"""
DPO = """
model_name_or_path: org/model
dataset_name: pairs.jsonl
beta: 0.2
loss_type: ipo
max_steps: 100
per_device_train_batch_size: 4
"""
GRPO = """
model_name_or_path: org/model
dataset_name: math.jsonl
reward_funcs: [accuracy_reward, my_rewards.length]
reward_weights: [1.0, 0.2]
num_generations: 4
max_completion_length: 256
beta: 0.04
loss_type: dr_grpo
scale_rewards: none
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
lora_r: 8
new_option: 3
"""


TRAINING = {"lr_scheduler_type": "linear", "adam_beta2": 0.999, "learning_rate": 1e-6}
CHECKPOINTED = {"disable_gradient_checkpointing": False}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def statuses(reports: list[KeyReport]) -> dict[str, str]:
    return {".".join(each.key): each.outcome.status for each in reports if each.key}


@pytest.mark.parametrize(("function", "note"), [(", my_rewards.length", "docs/rewards.md#kinds"), ("", "")])
def test_functions_alone_are_told_what_they_take(function: str, note: str, tmp_path: Path):
    text = GRPO.replace(", my_rewards.length", function)
    reports = import_trl(write(tmp_path, "grpo.yaml", text)).keys
    (outcome,) = (each.outcome for each in reports if each.key == ("reward_funcs",))
    assert note in outcome.note
    assert bool(outcome.note) == bool(function)


def test_fine_tuning_with_lora(tmp_path: Path):
    imported = import_trl(write(tmp_path, "sft.yaml", SFT))
    assert imported.to_do == ()
    config = validate_tree(imported.tree)
    assert (config.pipeline, config.rollout_batch_size, config.sequence_length) == ("sft", 16, 2048)
    args = config.actor_train.model_args
    assert (args.dtype, args.lora_rank, args.lora_alpha, args.use_rslora) == ("bfloat16", 32, 32, True)
    assert args.lora_target == "q_proj,v_proj"  # PEFT's
    assert config.data is not None
    assert (config.data.num_train_epochs, config.data.shuffle, config.data.too_long) == (3, True, "truncate")
    assert config.data.response_key == "completion"
    training = config.actor_train.training_args
    assert (training.learning_rate, training.lr_scheduler_type, training.adam_beta2) == (2e-5, "linear", 0.999)


def test_rows_that_trl_does_not_cut_are_not_cut_and_their_length_is_asked_for(tmp_path: Path):
    text = SFT.replace("max_length: 2048", "max_length: null")
    assert text != SFT
    imported = import_trl(write(tmp_path, "sft.yaml", text))
    (report,) = [each for each in imported.keys if each.key == ("max_length",)]
    assert (report.outcome.status, "sequence_length" in report.outcome.note) == ("no counterpart", True)
    config = validate_tree(imported.tree)
    assert config.data is not None
    assert config.data.too_long == "drop"


def test_preferences(tmp_path: Path):
    imported = import_trl(write(tmp_path, "dpo.yaml", DPO))
    assert imported.to_do == ()
    config = validate_tree(imported.tree)
    assert (config.dpo.loss_type, config.dpo.beta) == ("ipo", 0.2)
    assert (config.rollout_batch_size, config.max_steps) == (8, 100)  # four pairs
    assert config.data is not None
    assert config.data.num_train_epochs is None


def test_keys_that_another_key_switches_off_are_reported(tmp_path: Path):
    """TRL takes both as they are."""
    text = DPO.replace("loss_type: ipo", "loss_type: robust\neval_steps: 7")
    imported = import_trl(write(tmp_path, "dpo.yaml", text))
    assert imported.to_do == ()
    found = statuses(list(imported.keys))
    assert (found["loss_type"], found["eval_steps"]) == ("no effect", "no effect")
    config = validate_tree(imported.tree)
    assert (config.dpo.loss_type, config.eval_steps) == ("sigmoid", 10)


def test_grpo_becomes_rlvr(tmp_path: Path):
    tree, reports, _ = translate_trl(write(tmp_path, "grpo.yaml", GRPO))
    assert (tree["pipeline"], tree["rollout_batch_size"], tree["train_env_manager"]) == ("rlvr", 32, {"group_size": 4})
    assert (tree["adv_estimator"], tree["loss_agg_mode"], tree["loss_agg_length"]) == (
        "dr_grpo", "seq-mean-token-sum-norm", 256,
    )  # fmt: skip
    assert (tree["use_kl_loss"], tree["kl_loss_coef"]) == (True, 0.04)
    assert tree["rewards"] == [
        {"name": "accuracy-reward", "kind": "math_rule"},
        {"name": "length", "kind": "function", "path": "my_rewards:length", "weight": 0.2},
    ]
    found = statuses(reports)
    assert found["lora_r"] == "no effect"  # use_peft is not set
    assert found["new_option"] == "no counterpart"
    assert len(found) == 13


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("scale_rewards: batch", "reward_normalization", {"norm_std_type": "batch", "norm_mean_type": "group"}),
        ("{multi_objective_aggregation: normalize_then_sum, scale_rewards: batch}", "adv_estimator", "gdpo"),
        ("{multi_objective_aggregation: normalize_then_sum, scale_rewards: batch}", "reward_normalization", None),
        ("multi_objective_aggregation: sum_then_normalize", "adv_estimator", "grpo"),
        ("loss_type: cispo", "pg_variant", "cispo"),
        # the largest weight itself; a bound below 1 would be one on every token
        ("{loss_type: cispo, epsilon_high: 5.0, num_generations: 8}", "cispo_epsilon_high", 4.0),
        ("{loss_type: cispo, epsilon_high: 0.3, num_generations: 8}", "cispo_epsilon_high", None),
        ("{loss_type: cispo, epsilon: 0.3, num_generations: 8}", "pg_clip", None),
        ("{loss_type: sapo, sapo_temperature_neg: 1.2, num_generations: 8}", "sapo_temperature_neg", 1.2),
        ("sapo_temperature_neg: 1.2", "sapo_temperature_neg", None),
        ("epsilon: 0.3", "pg_clip", 0.3),
        ("shuffle_dataset: false", "data", {"shuffle": False, "num_train_epochs": 3}),
        # groups with equal rewards have no policy loss, but a KL and an entropy
        ("beta: 0.04", "zero_variance", "train"),
        ("entropy_coef: 0.01", "zero_variance", "train"),
        ("beta: 0.0", "zero_variance", None),
        # and count in the batch's deviation
        ("scale_rewards: batch", "zero_variance", "train"),
        ("{sync_ref_model: true, beta: 0.1, num_generations: 8}", "ref_model_sync_steps", 512),
        ("{sync_ref_model: true, beta: 0.1, num_generations: 8}", "ref_model_mixup_alpha", 0.6),
        ("{sync_ref_model: true, beta: 0.1, num_iterations: 2, ref_model_sync_steps: 64}", "ref_model_sync_steps", 32),
        ("ref_model_sync_steps: 64", "ref_model_sync_steps", None),
        ("num_generations_eval: 2", "val_env_manager", {"group_size": 2}),
        ("temperature: 0.9", "val_env_manager", {"group_size": 8}),
        ("use_vllm: false", "train_infer_correction", None),
        (
            "{use_vllm: true, vllm_importance_sampling_correction: false, num_generations: 8}",
            "train_infer_correction",
            None,
        ),
        (
            "use_vllm: true",
            "train_infer_correction",
            {
                "is_weight": {"weight_type": "sequence", "upper_bound": 3.0},
                "filters": [{"agg_type": "sequence", "ratio_high": 3.0}],
            },
        ),
        (
            "{use_vllm: true, vllm_importance_sampling_mode: token_truncate, vllm_importance_sampling_clip_max: 2.0, "
            "vllm_importance_sampling_clip_min: 0.5, num_generations: 8}",
            "train_infer_correction",
            {"is_weight": {"weight_type": "token", "upper_bound": 2.0, "lower_bound": 0.5}},
        ),
        ("reward_funcs: accuracy_reward", "data", {"num_train_epochs": 3, "ground_truth_key": "solution"}),
        (
            "{reward_funcs: [accuracy_reward, get_soft_overlong_punishment], reward_weights: [1.0, 0.5]}",
            "reward_shaping",
            {"overlong_max_length": 1280, "overlong_buffer": 256, "overlong_penalty": 0.5},
        ),
        (
            "{reward_funcs: [accuracy_reward, get_soft_overlong_punishment], reward_weights: [1.0, 0.5]}",
            "rewards",
            [{"name": "accuracy-reward", "kind": "math_rule"}],
        ),
        ("bf16: false", "actor_train", {"training_args": TRAINING, "model_args": CHECKPOINTED}),
        (
            "{bf16: false, dtype: bfloat16, num_generations: 8}",
            "actor_train",
            {"training_args": TRAINING, "model_args": {"dtype": "bfloat16", **CHECKPOINTED}},
        ),
        (
            "dtype: float32",
            "actor_train",
            {"training_args": TRAINING, "model_args": {"dtype": "bfloat16", **CHECKPOINTED}},
        ),
        ("{num_iterations: 2, top_k: 0}", "actor_infer", {"generating_args": {"top_k": -1, "max_new_tokens": 512}}),
        (
            "generation_kwargs: {stop: </search>, include_stop_str_in_output: false}",
            "actor_infer",
            {"generating_args": {"stop_strings": ["</search>"], "max_new_tokens": 512}},
        ),
        ("importance_sampling_level: sequence", "ratio_type", "sequence"),
        ("beta: 0.0", "use_kl_loss", None),
        ("delta: 2.0", "dual_clip", 2.0),
        ("{num_iterations: 2, max_steps: 100}", "max_steps", 50),
        (
            "{per_device_train_batch_size: auto, gradient_accumulation_steps: auto, num_generations: 8}",
            "rollout_batch_size",
            8,
        ),
        ("{steps_per_generation: 4, per_device_train_batch_size: 8, num_generations: 8}", "rollout_batch_size", 32),
        ("{num_processes: 4, per_device_train_batch_size: 8, num_generations: 8}", "rollout_batch_size", 32),
        (
            "{num_processes: 2, steps_per_generation: 4, per_device_train_batch_size: 8, num_generations: 8}",
            "rollout_batch_size",
            64,
        ),
        ("{num_processes: 4, beta: 0.1}", "rollout_batch_size", 64),  # pairs, of two responses
        ("{generation_batch_size: 64, per_device_train_batch_size: 8, num_generations: 8}", "rollout_batch_size", 64),
    ],
)
def test_an_option_of_grpo(line: str, key: str, expected: object, tmp_path: Path):
    text = line if line.startswith("{") else f"num_generations: 8\n{line}\n"
    assert translate_trl(write(tmp_path, "grpo.yaml", text))[0].get(key) == expected


def test_optimizer_steps_per_generation_and_the_warm_up_are_counted(tmp_path: Path):
    text = "{num_generations: 8, steps_per_generation: 6, gradient_accumulation_steps: 2, max_steps: 50, warmup_ratio: 0.05}"
    tree, reports, _ = translate_trl(write(tmp_path, "grpo.yaml", text))
    args = tree["actor_train"]["training_args"]
    assert (tree["rollout_batch_size"], args["num_minibatches"]) == (48, 3)
    assert (tree["max_steps"], args["warmup_steps"]) == (17, 1)  # 50 and 3 of the optimizer
    assert "no counterpart" not in statuses(reports).values()
    uneven, reports, _ = translate_trl(write(tmp_path, "uneven.yaml", text.replace("steps: 2", "steps: 4")))
    assert "num_minibatches" not in uneven["actor_train"]["training_args"]
    assert {report.outcome.note for report in reports if report.key == ("steps_per_generation",)} == {
        "set rollout_batch_size to a multiple of 32"
    }


@pytest.mark.parametrize(
    ("text", "command", "pipeline", "remark"),
    [
        ("{model_name_or_path: org/model, dataset_name: a.jsonl}", None, "sft", "neither its keys nor its name"),
        ("{model_name_or_path: org/model, dataset_name: a.jsonl}", "dpo", "dpo", None),
        ("{beta: 0.1, max_length: 512, max_completion_length: 256}", None, "dpo", "by its key beta"),
        ("{loss_type: [sigmoid], max_prompt_length: 256}", None, "dpo", "by its key loss_type"),
        ("{num_generations: 4, beta: 0.1}", None, "rlvr", "by its key num_generations"),
        ("{max_completion_length: 256, beta: 0.1}", None, "rlvr", "by its key max_completion_length"),
    ],
)
def test_the_command_is_that_of_the_keys_or_the_users(
    text: str, command: str | None, pipeline: str, remark: str | None, tmp_path: Path
):
    imported = import_trl(write(tmp_path, "config.yaml", text), command)
    assert imported.tree["pipeline"] == pipeline
    assert any((remark or "") in each for each in imported.remarks) == (remark is not None)


@pytest.mark.parametrize(
    ("lines", "data"),
    [
        ("dataset_name: org/rows", {"dataset_name": "org/rows"}),
        (
            "{dataset_name: org/rows, dataset_config: main, dataset_train_split: train}",
            {"dataset_name": "org/rows:main"},
        ),
        ("{dataset_name: org/rows, dataset_train_split: train_sft}", {"dataset_name": "org/rows:train_sft"}),
        (
            "{dataset_name: org/rows, dataset_config: main, dataset_test_split: dev, eval_strategy: steps}",
            {"dataset_name": "org/rows:main", "val_dataset_name": "org/rows:main/dev"},
        ),
        (
            "{dataset_name: org/rows, eval_strategy: steps}",
            {"dataset_name": "org/rows", "val_dataset_name": "org/rows"},
        ),
        ("{dataset_name: rows.jsonl, dataset_config: main, eval_strategy: steps}", {"dataset_name": "rows.jsonl"}),
    ],
)
def test_a_dataset_of_the_hub_is_one_name_with_config_and_split(lines: str, data: dict[str, str], tmp_path: Path):
    tree, _, _ = translate_trl(write(tmp_path, "sft.yaml", f"{lines}\n"))
    assert {key: value for key, value in tree["data"].items() if key.endswith("dataset_name")} == data
    validate_tree(tree)


def test_an_id_of_the_hub_is_left_to_the_start(tmp_path: Path):
    tree = import_trl(write(tmp_path, "sft.yaml", "{model_name_or_path: tiny, dataset_name: org/rows}")).tree
    issues = {issue.path: issue.message for issue in check_imported(tree)}
    assert issues["data.dataset_name"] == (
        "org/rows is a dataset of the hub, which `offbeat train` takes; or set a file"
    )


PLAIN = "{model_name_or_path: org/model, dataset_name: a.jsonl}"
SAMPLED = "{num_generations: 4, max_completion_length: 64}"


@pytest.mark.parametrize(
    ("name", "text", "command", "remark"),
    [
        ("kto.yaml", PLAIN, "kto", "`trl kto`, by its name"),
        ("my-rloo_run.yaml", SAMPLED, "rloo", "`trl rloo`, by its name"),
        ("run.yaml", SAMPLED, "grpo", "by its key num_generations, which `trl rloo` has, too"),
        ("dpo.yaml", PLAIN, "dpo", "`trl dpo`, by its name"),
        ("kto.yaml", "{beta: 0.2}", "kto", "by its name"),
        ("kto.yaml", "{loss_type: ipo}", "dpo", "by its key loss_type"),  # no name says otherwise
        ("kto.yaml", SAMPLED, "grpo", "by its key num_generations"),
        ("sft_or_dpo.yaml", PLAIN, "sft", "neither"),
        ("run.yaml", "{normalize_advantages: true}", "rloo", "by its key normalize_advantages"),
        ("run.yaml", "{desirable_weight: 1.5}", "kto", "by its key desirable_weight"),
        ("run.yaml", "{loss_type: kto}", "kto", "by its key loss_type"),
        ("run.yaml", "{center_rewards_coefficient: 0.1}", "reward", "by its key center_rewards_coefficient"),
    ],
)
def test_the_command_is_determined_by_keys_or_by_the_files_name(
    name: str, text: str, command: str, remark: str, tmp_path: Path
):
    path = write(tmp_path, name, text)
    assert find_command({**yaml.safe_load(text), NAME: path.stem}).name == command
    assert any(remark in each for each in translate_trl(path)[2])


def test_rloo_has_ratios_of_responses_and_a_kl_in_the_reward(tmp_path: Path):
    imported = import_trl(write(tmp_path, "rloo.yaml", "{model_name_or_path: org/model, dataset_name: a.jsonl}"))
    config = validate_tree(imported.tree | {"rewards": [{"name": "x", "kind": "math_rule"}]})
    assert (config.pipeline, config.adv_estimator, config.train_env_manager.group_size) == ("rlvr", "rloo", 2)
    assert (config.ratio_type, config.loss_agg_mode) == ("sequence-product", "seq-mean-token-mean")
    assert (config.init_kl_coef, config.zero_variance) == (0.05, "train")
    assert any("less beta times their KL" in remark for remark in imported.remarks)
    text = "{beta: 0.0, normalize_advantages: true, reward_clip_range: [-1, 1], use_vllm: true}"
    tree, reports, remarks = translate_trl(write(tmp_path, "rloo.yaml", text))
    assert (tree.get("init_kl_coef"), tree["zero_variance"], tree["whiten_advantages"]) == (None, "train", True)
    assert "zero_variance" not in translate_trl(write(tmp_path, "rloo.yaml", "beta: 0.0"))[0]
    assert "train_infer_correction" not in tree, "TRL's RLOO corrects nothing"
    assert statuses(reports)["reward_clip_range"] == "no counterpart"
    assert not any("times their KL" in remark for remark in remarks)


def test_kto_has_rows_of_one_response_in_the_files_order(tmp_path: Path):
    text = "{per_device_train_batch_size: 4, desirable_weight: 1.5, beta: 0.2}"
    tree, reports, _ = translate_trl(write(tmp_path, "kto.yaml", text))
    assert (tree["pipeline"], tree["dpo"]) == ("dpo", {"loss_type": "kto", "desirable_weight": 1.5, "beta": 0.2})
    assert (tree["rollout_batch_size"], tree["data"]["shuffle"]) == (8, False)
    assert "no counterpart" not in statuses(reports).values()
    shuffled = translate_trl(write(tmp_path, "kto.yaml", "{train_sampling_strategy: random}"))[0]
    assert shuffled["data"]["shuffle"] is True
    unpaired = translate_trl(write(tmp_path, "kto.yaml", "{loss_type: apo_zero_unpaired}"))
    assert (unpaired[0]["dpo"]["loss_type"], statuses(unpaired[1])["loss_type"]) == ("kto", "no counterpart")


def test_a_reward_models_rows_are_not_cut(tmp_path: Path):
    text = "{model_name_or_path: org/model, dataset_name: a.jsonl, center_rewards_coefficient: 0.01}"
    imported = import_trl(write(tmp_path, "run.yaml", text))
    config = validate_tree(imported.tree)
    assert (config.pipeline, config.rollout_batch_size, config.center_rewards_coefficient) == ("reward_model", 16, 0.01)
    assert config.actor_train.training_args.learning_rate == 1e-4
    assert config.data is not None
    assert config.data.too_long == "drop"


def test_the_loss_of_fine_tuning_is_said_to_be_on_other_tokens(tmp_path: Path):
    remarks = import_trl(write(tmp_path, "sft.yaml", SFT)).remarks
    assert any("every token of `messages`" in remark for remark in remarks)
    text = f"{SFT}assistant_only_loss: true\npacking: true\nshuffle_dataset: false\nwarmup_steps: 0.1\n"
    imported = import_trl(write(tmp_path, "assistant.yaml", text))
    assert not any("every token" in remark for remark in imported.remarks)
    found = {".".join(each.key): each.outcome for each in imported.keys if each.key}
    assert (found["packing"].status, found["shuffle_dataset"].status) == ("no counterpart", "no effect")
    assert "packed sequences there, rows here" in found["per_device_train_batch_size"].note
    assert (found["warmup_steps"].status, "share" in found["warmup_steps"].note) == ("no counterpart", True)
    stepwise = text.replace("warmup_steps: 0.1", "warmup_steps: 0.1\nmax_steps: 200")
    tree = import_trl(write(tmp_path, "steps.yaml", stepwise)).tree
    assert tree["actor_train"]["training_args"]["warmup_steps"] == 20


@pytest.mark.parametrize("warmup", ["warmup_steps: 20", "warmup_ratio: 0.1"])
@pytest.mark.parametrize(("schedule", "steps"), [("constant", None), ("constant_with_warmup", 20)])
def test_a_constant_schedule_has_no_warm_up(schedule: str, steps: int | None, warmup: str, tmp_path: Path):
    """As transformers' `get_scheduler`, where `constant` ignores it."""
    text = f"{SFT}lr_scheduler_type: {schedule}\n{warmup}\nmax_steps: 200\n"
    tree, reports, _ = translate_trl(write(tmp_path, "sft.yaml", text))
    assert tree["actor_train"]["training_args"].get("warmup_steps") == steps
    (status,) = {each.outcome.status for each in reports if each.key == (warmup.partition(":")[0],)}
    assert (status == "no effect") == (steps is None)


@pytest.mark.parametrize(("key", "is_said"), [("", True), ("max_prompt_length: 2048\n", False)])
def test_prompts_that_trl_does_not_limit_are_said_to_be(key: str, is_said: bool, tmp_path: Path):
    _, _, remarks = translate_trl(write(tmp_path, "grpo.yaml", GRPO + key))
    assert any("longest prompt" in remark for remark in remarks) == is_said


@pytest.mark.parametrize(
    ("keys", "sampling"),
    [
        ("eval_strategy: steps\ntemperature: 0.7\ntop_k: 20\n", "{temperature: 0.7, top_k: 20}"),
        ("eval_strategy: steps\ntemperature: 1.0\ntop_k: 0\n", None),
        ("eval_strategy: 'no'\ntemperature: 0.7\n", None),
    ],
)
def test_the_sampling_of_evaluations_is_said(keys: str, sampling: str | None, tmp_path: Path):
    """It can not be written: a file without validation rows evaluates nothing."""
    _, _, remarks = translate_trl(write(tmp_path, "grpo.yaml", GRPO + keys))
    said = [remark for remark in remarks if "evaluations" in remark]
    assert [remark.rpartition("generating_args: ")[2] for remark in said] == ([] if sampling is None else [sampling])


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ("save_steps: 100\n", 1_000_000),
        ("save_total_limit: null\n", 1_000_000),
        ("save_steps: 100\nsave_total_limit: 3\n", 3),
        ("", None),
    ],
)
def test_checkpoints_that_trl_keeps_are_kept(keys: str, kept: int | None, tmp_path: Path):
    """Without an interval Offbeat's is shorter than TRL's 500 steps, and the newest are kept."""
    tree, _, _ = translate_trl(write(tmp_path, "sft.yaml", SFT + keys))
    assert tree.get("max_ckpt_to_keep") == kept


def test_quantized_fine_tuning(tmp_path: Path):
    quantized = "load_in_4bit: true\nuse_bnb_nested_quant: true\nbnb_4bit_quant_type: fp4\noptim: adamw_bnb_8bit\n"
    imported = import_trl(write(tmp_path, "sft.yaml", SFT + quantized + "bnb_4bit_quant_storage: bfloat16\n"))
    assert imported.to_do == ()
    config = validate_tree(imported.tree)
    args = config.actor_train.model_args
    assert (args.load_in_4bit, args.bnb_4bit_quant_type, args.use_bnb_nested_quant) == (True, "fp4", True)
    assert config.actor_train.training_args.optim == "adamw_8bit"


@pytest.mark.parametrize(("value", "status"), [("true", "no counterpart"), ("false", "no effect")])
def test_4_bit_weights_without_adapters_are_reported(tmp_path: Path, value: str, status: str):
    """The import would train all weights."""
    whole = SFT.replace("use_peft: true", f"use_peft: false\nload_in_4bit: {value}")
    imported = import_trl(write(tmp_path, "sft.yaml", whole))
    assert statuses(list(imported.keys))["load_in_4bit"] == status
    advised = [each.key for each in imported.keys if "set use_peft" in each.outcome.note]
    assert advised == ([("load_in_4bit",)] if value == "true" else [])


@pytest.mark.parametrize(
    ("keys", "key", "status"),
    [
        ("bnb_4bit_quant_type: fp4", "bnb_4bit_quant_type", "no effect"),
        ("load_in_8bit: true", "load_in_8bit", "no counterpart"),
        ("optim: paged_adamw_8bit", "optim", "no counterpart"),
    ],
)
def test_keys_of_quantization_without_effect_or_counterpart(tmp_path: Path, keys: str, key: str, status: str):
    imported = import_trl(write(tmp_path, "sft.yaml", f"{SFT}{keys}\n"))
    assert statuses(list(imported.keys))[key] == status
    assert not validate_tree(imported.tree).actor_train.model_args.load_in_4bit

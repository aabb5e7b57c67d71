"""ROLL's own files (Apache-2.0; each names its place in github.com/alibaba/ROLL) become ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from offbeat.deploy.config.checks.unused import check_unused
from offbeat.deploy.config.importing.fitting import check_imported
from offbeat.deploy.config.importing.report import Imported
from offbeat.deploy.config.importing.roll import import_roll
from offbeat.deploy.config.importing.trial import make_trial
from offbeat.deploy.config.importing.writing import to_yaml
from offbeat.deploy.config.loader import compose_files, load_run, validate_tree
from tests.paths import ROOT

FILES = Path(__file__).parent / "roll"
FROZEN_LAKE = FILES / "agentic" / "agent_val_frozen_lake.yaml"
DYNAMIC = FILES / "agentic" / "agentic_val_sokoban_dynamic_batching.yaml"
ATROPOS = FILES / "agentic_demo" / "atropos_gsm8k_grpo_qwen25_0.5b.yaml"


def outcomes(imported: Imported) -> dict[str, tuple[str, object]]:
    """Each key with its status and value; defaults under our name."""
    return {
        ".".join(each.key or each.outcome.target or ()): (each.outcome.status, each.outcome.value)
        for each in imported.keys
    }


def write_variant(folder: Path, text: str) -> Path:
    """A file beside ROLL's, with keys that replace those of the frozen lake."""
    tree = {**yaml.safe_load(FROZEN_LAKE.read_text()), **yaml.safe_load(text)}
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / "traj_envs.yaml").write_text((FILES / "config" / "traj_envs.yaml").read_text())
    (folder / "agentic").mkdir(exist_ok=True)
    path = folder / "agentic" / "variant.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize("file", [FROZEN_LAKE, DYNAMIC], ids=lambda file: file.stem)
def test_every_key_of_a_file_is_reported_once(file: Path):
    composed = OmegaConf.to_container(compose_files(file)[0], resolve=True)
    assert isinstance(composed, dict)
    imported = import_roll(file)
    reported = [each.key for each in imported.keys if each.key]
    assert len(reported) == len(set(reported))
    assert {key[0] for key in reported} == set(map(str, composed))
    for role in ("actor_train", "actor_infer", "reference", "train_env_manager"):
        assert {key[1] for key in reported if key[0] == role} == set(composed[role])


@pytest.mark.parametrize("file", [FROZEN_LAKE, DYNAMIC], ids=lambda file: file.stem)
def test_an_agentic_file_validates_with_model_and_devices_replaced(file: Path, tmp_path: Path):
    imported = import_roll(file)
    assert imported.to_do == ()
    validate_tree(imported.tree)
    trial = Imported(file, make_trial(imported.tree), imported.keys)
    assert check_imported(trial.tree) == []
    out = tmp_path / "out.yaml"
    out.write_text(to_yaml(trial, "roll"))
    assert load_run(out).custom_envs["FrozenLake"].max_tokens_per_step == 64


def test_the_algorithm_is_that_of_roll():
    config = validate_tree(import_roll(FROZEN_LAKE).tree)
    assert config.reward_normalization.method == "mean_std"
    assert (config.adv_estimator, config.loss_agg_mode, config.max_staleness) == ("grpo", "seq-mean-token-mean", 0)
    assert (config.old_logprobs, config.whiten_advantages, config.advantage_clip) == ("recompute", True, 0.2)
    args = config.actor_train.training_args
    assert (args.lr_scheduler_type, args.warmup_steps, args.adam_beta2, args.num_minibatches) == (
        "cosine",
        10,
        0.999,
        1,
    )
    assert (config.actor_train.num_processes, config.actor_infer.num_replicas) == (8, 8)
    assert config.actor_train.strategy_args.zero_stage == 1
    assert config.actor_infer.generating_args.top_k == 100


@pytest.mark.parametrize(
    ("engine", "evaluation", "expected"),
    [
        # ROLL gives the engine's settings to both managers
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {"temperature": 0.2}, (0.6, 0.9, 20)),
        ({"temperature": 0.6}, None, (0.6, 0.7, 50)),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1}, {"temperature": 0.2}, (1.0, 1.0, -1)),
        (None, {"temperature": 0.2}, (0.2, 0.7, 50)),
    ],
)
def test_evaluations_are_sampled_as_in_roll(
    engine: dict[str, Any] | None, evaluation: dict[str, Any] | None, expected: tuple[float, ...], tmp_path: Path
):
    roles = yaml.safe_load(FROZEN_LAKE.read_text())
    roles = {name: roles[name] for name in ("actor_infer", "val_env_manager")}
    for role, args in (("actor_infer", engine), ("val_env_manager", evaluation)):
        roles[role].pop("generating_args", None)
        roles[role] |= {} if args is None else {"generating_args": {"max_new_tokens": 64, **args}}
    config = validate_tree(import_roll(write_variant(tmp_path, yaml.safe_dump(roles))).tree)
    args = config.val_env_manager.generating_args.for_evaluation(config.actor_infer.generating_args)
    assert (args.temperature, args.top_p, args.top_k) == expected


@pytest.mark.parametrize(("limit", "expected"), [(32, 32), (128, 64), (None, 64)])
def test_an_answer_ends_at_the_least_limit(limit: int | None, expected: int, tmp_path: Path):
    """FrozenLake's turns have 64 tokens."""
    args = {} if limit is None else {"max_new_tokens": limit}
    infer = {**yaml.safe_load(FROZEN_LAKE.read_text())["actor_infer"], "generating_args": {"temperature": 1.0, **args}}
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump({"actor_infer": infer})))
    assert imported.tree["custom_envs"]["FrozenLake"]["max_tokens_per_step"] == expected
    trial = make_trial(imported.tree)
    assert check_imported(trial) == []


@pytest.mark.parametrize(("train", "val", "answers"), [(32, None, (64, 64)), (128, 32, (64, 32)), (32, 128, (64, 64))])
def test_an_answer_ends_at_the_limits_of_managers_that_play_it(
    train: int, val: int | None, answers: tuple[int, int], tmp_path: Path
):
    """Training and evaluation play FrozenLake, evaluation alone Sokoban."""
    tree = yaml.safe_load(FROZEN_LAKE.read_text())
    managers = {name: tree[name] for name in ("train_env_manager", "val_env_manager")}
    for manager, limit in zip(managers.values(), (train, val), strict=True):
        others = {name: value for name, value in manager["generating_args"].items() if name != "max_new_tokens"}
        manager["generating_args"] = others | ({} if limit is None else {"max_new_tokens": limit})
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump(managers)))
    config = validate_tree(imported.tree)
    envs = config.custom_envs
    assert (envs["FrozenLake"].max_tokens_per_step, envs["SimpleSokoban"].max_tokens_per_step) == answers
    evaluation = config.val_env_manager.generating_args.for_evaluation(config.actor_infer.generating_args)
    assert (config.actor_infer.generating_args.max_new_tokens, evaluation.max_new_tokens) == (train, val or 64)
    assert list(check_unused(config)) == []


def test_stop_strings_are_those_of_roll(tmp_path: Path):
    stops = {"stop_strings": ["</search>"], "include_stop_str_in_output": True}
    tree = yaml.safe_load(FROZEN_LAKE.read_text())
    train = {**tree["train_env_manager"], "generating_args": {**tree["train_env_manager"]["generating_args"], **stops}}
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump({"train_env_manager": train})))
    config = validate_tree(imported.tree)
    assert config.actor_infer.generating_args.stop_strings == ("</search>",)
    infer = {**tree["actor_infer"], "generating_args": {"max_new_tokens": 64, **stops}}
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump({"actor_infer": infer})))
    config = validate_tree(imported.tree)
    args = config.actor_infer.generating_args
    assert (
        args.stop_strings == config.val_env_manager.generating_args.for_evaluation(args).stop_strings == ("</search>",)
    )
    assert outcomes(imported)["actor_infer.generating_args.include_stop_str_in_output"][0] == "same"


def test_the_policys_backend_timeout_is_that_of_all_roles(tmp_path: Path):
    variant = write_variant(tmp_path, "actor_train: {backend_timeout: 60}\nactor_infer: {backend_timeout: 90}")
    imported = import_roll(variant)
    assert validate_tree(imported.tree).actor_train.backend_timeout == 60
    assert outcomes(imported)["actor_infer.backend_timeout"][0] == "no counterpart"


def test_the_docs_name_the_defaults_of_a_file_that_is_not_imported(tmp_path: Path):
    tree = yaml.safe_load(FROZEN_LAKE.read_text())
    tree["actor_train"]["training_args"] = {}
    tree["train_env_manager"].pop("generating_args")
    tree.pop("max_steps")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**tree, "defaults": []}))
    written = [each.outcome.target or () for each in import_roll(tmp_path / "run.yaml").of_status("default")]
    docs = (ROOT / "docs" / "configuration.md").read_text()
    (paragraph,) = [each for each in docs.split("\n\n") if each.startswith("Keys that such a file leaves out")]
    assert {key[-1] for key in written if f"`{key[-1]}:" not in paragraph} == {"device", "max_new_tokens"}


def test_the_report_says_what_became_of_a_key():
    found = outcomes(import_roll(FROZEN_LAKE))
    assert found["max_grad_norm"] == ("renamed", 1.0)
    assert found["actor_train.model_args.dtype"] == ("value", "bfloat16")
    assert found["actor_train.strategy_args.strategy_name"] == ("value", "deepspeed_train")
    assert found["actor_infer.strategy_args.strategy_config.load_format"][0] == "same"
    assert found["reference.strategy_args.strategy_name"][0] == "no effect"
    assert found["max_staleness"] == ("default", 0)
    assert found["custom_env"][0] == "same"
    found = outcomes(import_roll(DYNAMIC))
    assert found["actor_train.sequence_length_round_in_train"][0] == "no effect"
    assert found["actor_train.max_tokens_per_microbatch_in_train"][0] == "renamed"


def test_without_a_counterpart_a_key_is_listed_in_the_report_and_the_file(tmp_path: Path):
    imported = import_roll(write_variant(tmp_path, "rpc_timeout: 72000\nmodel_download_type: MODELSCOPE"))
    lines = [str(each) for each in imported.of_status("no counterpart")]
    assert any(line.startswith("rpc_timeout (each wait has its own") for line in lines)
    assert "rpc_timeout" not in imported.tree
    header = to_yaml(imported, "roll").partition("\n\n")[0]
    assert "#   rpc_timeout (" in header
    assert "#   model_download_type (" in header


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("{dual_clip_loss: true, ppo_epochs: 2}", "dual_clip", 1.4),
        ("{ppo_epochs: 2, use_pg_clip_range: true, pg_clip_low: 0.1}", "pg_clip_low", 0.1),
        ("pg_clip_low: 0.1", "pg_clip_low", None),
        ("{ratio_type: segment, ppo_epochs: 2}", "ratio_type", "turn"),
        ("ratio_type: segment", "ratio_type", None),
        ("async_generation_ratio: 1", "max_staleness", 1),
        ("reward_normalization: {grouping: batch, method: identity}", "adv_estimator", "reinforce"),
        ("{adv_estimator: gae, critic: {device_mapping: 'list(range(0,8))'}}", "adv_estimator", "gae"),
        ("{init_kl_coef: 0.1}", "init_kl_coef", None),
        ("{init_kl_coef: 0.1, add_token_level_kl: true}", "init_kl_coef", 0.1),
        # groups with equal rewards have no policy loss, but a KL and an entropy
        ("{whiten_advantages: false, use_kl_loss: true, kl_loss_coef: 0.1}", "zero_variance", "train"),
        ("{whiten_advantages: false, entropy_loss_coef: 0.01}", "zero_variance", "train"),
        ("{whiten_advantages: false, use_kl_loss: true, kl_loss_coef: 0.0}", "zero_variance", None),
        ("{whiten_advantages: false, use_kl_loss: false, entropy_loss_coef: 0}", "zero_variance", None),
        # and count in means and deviations of the batch
        ("{}", "zero_variance", "train"),
        ("{whiten_advantages: false, whiten_rewards: true}", "zero_variance", "train"),
        (
            "{whiten_advantages: false, reward_normalization: {norm_mean_type: group, norm_std_type: batch}}",
            "zero_variance",
            "train",
        ),
        (
            "{whiten_advantages: false, reward_normalization: {norm_mean_type: group, method: mean_std}}",
            "zero_variance",
            "train",
        ),
        ("{adv_estimator: gae, critic: {device_mapping: 'list(range(0,8))'}}", "zero_variance", None),
        ("{difficulty_mask: true}", "zero_variance", None),
        ("max_ckpt_to_keep: 0", "max_ckpt_to_keep", 1_000_000),
        ("{}", "max_ckpt_to_keep", 1_000_000),
        ("max_ckpt_to_keep: 3", "max_ckpt_to_keep", 3),
        ("exp_name: 'a b/c'", "exp_name", "a-b-c"),
        ("rollout_dump_dir: dumps", "rollout", {"keep_text": True}),
        ("profiler_timeline: true", "profiler_timeline", True),
        ("{actor_train: {router_replay: {mode: R3}}}", "router_replay", True),
        ("{actor_train: {router_replay: {mode: disable}}}", "router_replay", None),
        ("{actor_train: {router_replay: {mode: R2}}}", "router_replay", None),
    ],
)
def test_a_value_is_mapped(text: str, key: str, expected: object, tmp_path: Path):
    imported = import_roll(write_variant(tmp_path, text))
    assert imported.tree.get(key) == expected
    validate_tree(imported.tree)


@pytest.mark.parametrize(
    ("estimator", "table", "expected"),
    [
        # ROLL's default of `grouping` is the batch
        ("reinforce", {"method": "mean_std"}, {"method": "mean_std", "grouping": "batch"}),
        ("grpo", {"method": "mean"}, {"method": "mean", "grouping": "batch"}),
        ("step_reinforce", {"norm_mean_type": "batch"}, {"method": "mean", "grouping": "batch"}),
        (
            "grpo",
            {"norm_mean_type": "group", "norm_std_type": "group"},
            {"norm_mean_type": "group", "norm_std_type": "group", "grouping": "batch"},
        ),
        ("grpo", {"norm_mean_type": "batch", "grouping": "tags"}, {"norm_mean_type": "batch"}),
        ("gigpo", {"method": "mean_std"}, {"method": "mean_std"}),
        # the scope that is left out follows from `method`
        (
            "grpo",
            {"method": "mean_std", "norm_mean_type": "group", "norm_std_type": None, "grouping": "traj_group_id"},
            {"norm_mean_type": "group", "norm_std_type": "group", "grouping": "traj_group_id"},
        ),
        (
            "grpo",
            {"method": "mean", "norm_std_type": "group"},
            {"norm_mean_type": "batch", "norm_std_type": "group", "grouping": "batch"},
        ),
        ("grpo", {"norm_std_type": "batch"}, {"norm_std_type": "batch"}),
        (
            "step_reinforce",
            {"method": "mean_std", "norm_mean_type": "group", "grouping": "state"},
            {"method": "mean_std", "grouping": "state"},
        ),
        (
            "step_reinforce",
            {"method": "mean", "norm_std_type": "group", "grouping": "tags"},
            {"method": "mean_std", "grouping": "tags"},
        ),
    ],
)
def test_rewards_are_normalized_over_what_roll_takes(
    estimator: str, table: dict[str, Any], expected: dict[str, Any], tmp_path: Path
):
    text = yaml.safe_dump({"adv_estimator": estimator, "reward_normalization": table, "whiten_advantages": False})
    imported = import_roll(write_variant(tmp_path, text))
    assert imported.tree["reward_normalization"] == expected
    validate_tree(imported.tree)


@pytest.mark.parametrize(("devices", "kept"), [("[2, 3]", 2), ("[1, 2]", 0)])
def test_a_critics_own_devices_are_kept(devices: str, kept: int, tmp_path: Path):
    others = "actor_train: {device_mapping: [0]}, actor_infer: {device_mapping: [1]}"
    text = f"{{adv_estimator: gae, {others}, critic: {{device_mapping: {devices}}}}}"
    imported = import_roll(write_variant(tmp_path, text))
    assert validate_tree(imported.tree).num_critic_processes == kept


def test_a_pure_distillation_takes_the_opd_estimator(tmp_path: Path):
    text = "{is_pure_opd: true, teacher: {model_args: {model_name_or_path: /m}, device_mapping: 'list(range(0,8))'}}"
    config = validate_tree(import_roll(write_variant(tmp_path, text)).tree)
    assert config.adv_estimator == "opd"
    assert config.teacher["teacher"].model_args.model_name_or_path == "/m"


def test_a_role_without_settings_is_as_if_left_out(tmp_path: Path):
    imported = import_roll(write_variant(tmp_path, "{teacher: null, reference: null}"))
    assert "teacher: has no settings; left out" in imported.remarks
    config = validate_tree(imported.tree)
    assert config.teacher == {}
    assert config.adv_estimator == "grpo"


def test_megatron_of_several_devices_becomes_fsdp_with_the_same_optimizer_steps(tmp_path: Path):
    tree = yaml.safe_load(FROZEN_LAKE.read_text())["actor_train"]
    tree["strategy_args"]["strategy_config"]["tensor_model_parallel_size"] = 4
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump({"actor_train": tree, "rollout_batch_size": 1024})))
    train = validate_tree(imported.tree).actor_train
    assert train.strategy_args.strategy_name == "fsdp2_train"
    assert train.training_args.gradient_accumulation_steps == 16  # of 2 trajectories on 8 devices, not 64 on 2
    assert train.training_args.num_minibatches == 4
    key = "actor_train.strategy_args.strategy_config.tensor_model_parallel_size"
    assert outcomes(imported)[key][0] == "no counterpart"


def test_devices_that_share_a_sequence_take_as_many_trajectories_as_in_roll(tmp_path: Path):
    tree = yaml.safe_load(FROZEN_LAKE.read_text())["actor_train"]
    tree["strategy_args"] = {"strategy_name": "fsdp2_train"}
    tree["model_args"] = {"ulysses_size": 4}
    changes = {"actor_train": tree, "rollout_batch_size": 1024}
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump(changes)))
    train = validate_tree(imported.tree).actor_train
    assert (train.strategy_args.ulysses_size, train.num_processes) == (4, 8)
    assert train.training_args.gradient_accumulation_steps == 64  # of 2 trajectories on 2 groups of 4 devices
    assert train.training_args.num_minibatches == 4
    tree["strategy_args"] = {"strategy_name": "deepspeed_train"}
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump(changes)))
    assert outcomes(imported)["actor_train.model_args.ulysses_size"][0] == "no counterpart"
    assert validate_tree(imported.tree).actor_train.training_args.gradient_accumulation_steps == 16


def test_shards_without_accumulation_share_the_micro_batch(tmp_path: Path):
    """As in ROLL's example of on-policy distillation, whose file was refused: 4 pipelines of 2 devices took 8 each."""
    tree = yaml.safe_load(FROZEN_LAKE.read_text())["actor_train"]
    tree["strategy_args"]["strategy_config"]["pipeline_model_parallel_size"] = 2
    tree["training_args"] |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump({"actor_train": tree, "rollout_batch_size": 64})))
    assert imported.to_do == ()
    train = validate_tree(imported.tree).actor_train
    assert (train.training_args.per_device_train_batch_size, train.num_processes) == (4, 8)
    assert train.training_args.num_minibatches == 2
    tree["training_args"]["gradient_accumulation_steps"] = 3
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump({"actor_train": tree, "rollout_batch_size": 96})))
    args = validate_tree(imported.tree).actor_train.training_args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.num_minibatches) == (4, 3, 1)


@pytest.mark.parametrize(
    ("args", "batch", "expected"),
    [
        ({"per_device_train_batch_size": 1}, 32, 16),
        ({"gradient_accumulation_steps": 2}, 64, 2),
        ({}, 32, 2),
        # a batch below ROLL's 16 trajectories of a step
        ({}, 12, 1),
        ({"gradient_accumulation_steps": 2}, 12, 1),
        ({"per_device_train_batch_size": 16}, 12, 1),
    ],
)
def test_parts_of_an_optimizer_step_that_a_file_leaves_out_are_those_of_roll(
    args: dict[str, int], batch: int, expected: int, tmp_path: Path
):
    """Of two devices; ROLL's parts are 8 trajectories and one micro-batch."""
    train = {"training_args": args, "device_mapping": [0, 1]}
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump({"actor_train": train, "rollout_batch_size": batch})))
    assert validate_tree(imported.tree).actor_train.training_args.num_minibatches == expected
    assert not any("training_args" in str(each) for each in imported.of_status("no effect"))


def test_dynamic_batches_have_the_optimizer_steps_of_rolls_defaults(tmp_path: Path):
    train = {
        "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_train": 8192,
        "device_mapping": [0, 1],
    }
    imported = import_roll(write_variant(tmp_path, yaml.safe_dump({"actor_train": train, "rollout_batch_size": 64})))
    assert validate_tree(imported.tree).actor_train.training_args.num_minibatches == 4


def sglang_role(**config: object) -> str:
    """A file's engines as ROLL's example of SGLang has them, of two GPUs each."""
    tree = yaml.safe_load(FROZEN_LAKE.read_text())["actor_infer"]
    server = {"mem_fraction_static": 0.7, "load_format": "dummy", **config}
    tree["strategy_args"] = {"strategy_name": "sglang", "strategy_config": server}
    return yaml.safe_dump({"actor_infer": {**tree, "num_gpus_per_worker": 2}})


def test_sglang_stays_with_its_servers_arguments(tmp_path: Path):
    arguments = {"max_running_requests": 64, "schedule_policy": "fcfs", "grpc_mode": False}
    imported = import_roll(write_variant(tmp_path, sglang_role(**arguments)))
    infer = validate_tree(imported.tree).actor_infer
    assert infer.strategy_args.strategy_name == "sglang"
    engine = infer.engine
    assert (engine.tensor_parallel_size, engine.gpu_memory_utilization, engine.max_num_seqs) == (2, 0.7, 64)
    assert engine.model_extra == {"schedule_policy": "fcfs"}, "and neither ROLL's load_format nor grpc_mode"
    assert infer.num_replicas == 4, "of ROLL's eight devices"
    lines = [str(each) for each in imported.keys]
    assert any(line.startswith("actor_infer.strategy_args.strategy_name (a server per replica") for line in lines)
    trial = make_trial(imported.tree)
    assert check_imported(trial) == [], "on CPUs vLLM samples, without the server's arguments"


def test_sglangs_arguments_with_keys_of_their_own_are_taken_by_these(tmp_path: Path):
    arguments = {"context_length": 32768, "disable_radix_cache": True, "random_seed": 3}
    imported = import_roll(write_variant(tmp_path, sglang_role(**arguments)))
    engine = validate_tree(imported.tree).actor_infer.engine
    assert (engine.max_model_len, engine.enable_prefix_caching, engine.model_extra) == (32768, False, {})
    statuses = {each.key[-1]: each.outcome.status for each in imported.keys if each.key and each.key[-1] in arguments}
    assert statuses == {"context_length": "renamed", "disable_radix_cache": "value", "random_seed": "no counterpart"}


def test_sglang_becomes_vllm_for_a_policy_with_image_input(tmp_path: Path):
    envs = yaml.safe_load((FILES / "config" / "traj_envs.yaml").read_text())["custom_env"]
    manager = "roll.pipeline.agentic.env_manager.vl_traj_env_manager.VLTrajEnvManager"
    lake = {**envs["FrozenLake"], "env_manager_cls": manager}
    text = sglang_role(schedule_policy="fcfs") + yaml.safe_dump({"custom_envs": {"FrozenLake": lake}})
    imported = import_roll(write_variant(tmp_path, text))
    assert imported.tree["actor_infer"]["strategy_args"]["strategy_name"] == "vllm"
    lines = [str(each) for each in imported.keys]
    assert any("strategy_name: vllm (sglang is given text, and the policy has image input)" in line for line in lines)
    assert any("schedule_policy (vLLM has no such engine argument)" in line for line in lines)


def test_filters_keep_the_bounds_that_are_on(tmp_path: Path):
    text = "train_infer_correction: {filters: [{enabled: true, agg_type: segment, ratio_high: 1.1}, {enabled: false}]}"
    config = validate_tree(import_roll(write_variant(tmp_path, text)).tree)
    (only,) = config.train_infer_correction.filters
    assert (only.agg_type, only.ratio_low, only.ratio_high, only.diff_low) == ("turn", 0.8, 1.1, None)


def test_a_key_that_roll_drops_has_no_effect(tmp_path: Path):
    imported = import_roll(write_variant(tmp_path, "{reward_shift: false, actor_train: {use_kernel: true}}"))
    notes = {".".join(each.key): each.outcome.note for each in imported.of_status("no effect")}
    assert notes["reward_shift"] == "ROLL has no key reward_shift"
    assert notes["actor_train.use_kernel"] == "ROLL has no key actor_train.use_kernel"


def test_secrets_of_the_environment_are_not_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    imported = import_roll(ATROPOS)
    assert "secret-key" not in to_yaml(imported, "roll")
    assert outcomes(imported)["tracker_kwargs.api_key"][0] == "no counterpart"
    assert imported.tree["tracker_kwargs"]["wandb"]["project"] == "roll-atropos-integration"


def test_a_missing_file_of_the_defaults_list_is_a_remark():
    assert any("deepspeed_zero2.yaml" in remark for remark in import_roll(ATROPOS).remarks)


def test_an_interpolation_of_nothing_is_a_remark(tmp_path: Path):
    imported = import_roll(write_variant(tmp_path, "critic: {strategy_args: {strategy_config: '${deepspeed_zero2}'}}"))
    assert any("deepspeed_zero2" in remark for remark in imported.remarks)
    validate_tree(imported.tree)


def test_an_env_without_counterpart_is_to_be_filled_in():
    issues = check_imported(make_trial(import_roll(ATROPOS).tree))
    assert any(issue.path == "custom_envs.AtroposGSM8KTrain.env_type" for issue in issues)


def test_envs_of_a_file_that_others_include_are_its_envs():
    tree = import_roll(FILES / "config" / "traj_envs.yaml").tree
    assert set(tree["custom_envs"]) == {
        "SimpleSokoban", "LargerSokoban", "SokobanDifferentGridVocab", "FrozenLake", "FrozenLakeThink", "WebShopEnv",
    }  # fmt: skip
    assert "actor_train" not in tree


def test_gems_envs_are_those_of_the_adapter(tmp_path: Path):
    env = "{env_type: 'game:GuessTheNumber-v0', max_steps: 3, env_config: {max_number: 9}}"
    text = (
        f"{{custom_envs: {{Guess: {env}}}, train_env_manager: {{tags: [Guess]}}, val_env_manager: {{tags: [Guess]}}}}"
    )
    env = validate_tree(import_roll(write_variant(tmp_path, text)).tree).custom_envs["Guess"]
    assert (env.env_type, env.execution) == ("gem", "process")
    assert env.env_config == {"id": "game:GuessTheNumber-v0", "kwargs": {"max_number": 9}}


def test_a_tool_wrapper_becomes_an_env_of_tools(tmp_path: Path):
    code = {
        "tool_id": "python_code",
        "tool_args": {"timeout": 8, "sandbox_type": "none", "keep_error_last_line": False},
    }
    search = {"tool_id": "search", "tool_args": {"search_url": "http://one/retrieve", "topk": 5, "num_workers": 2}}
    mcp = {"tool_id": "mcp", "tool_args": {"server_url": "http://two/mcp", "tool_names_subset": ["open"]}}
    wrapper = {
        "wrapper_args": {"tool_reward": 0, "tool_success_reward": 0.1, "max_tool_uses": 2},
        "tool_configs": [code, search, mcp],
    }
    env = {
        "env_type": "game:GuessTheNumber-v0",
        "max_steps": 3,
        "env_config": {"max_number": 9},
        "tool_wrapper": wrapper,
    }
    text = json.dumps(
        {
            "custom_envs": {"Guess": env},
            "train_env_manager": {"tags": ["Guess"]},
            "val_env_manager": {"tags": ["Guess"]},
        }
    )
    imported = import_roll(write_variant(tmp_path, text))
    table = imported.tree["custom_envs"]["Guess"]
    assert table["env_type"] == "tools"
    assert table["env_config"] == {
        "env_type": "gem",
        "env_config": {"id": "game:GuessTheNumber-v0", "kwargs": {"max_number": 9}},
        "tools": [
            {"tool_id": "python_code", "limits": {"timeout_s": 8, "cpu_s": 8}},
            {"tool_id": "search", "url": "http://one/retrieve", "top_k": 5, "timeout_s": 5},
            {"tool_id": "mcp", "url": "http://two/mcp", "functions": ["open"]},
        ],
        "tool_reward": 0,
        "tool_success_reward": 0.1,
        "max_tool_uses": 2,
    }
    (report,) = [each.outcome for each in imported.keys if each.key == ("custom_envs", "Guess", "tool_wrapper")]
    assert (report.status, report.target) == ("renamed", ("custom_envs", "Guess", "env_config", "tools"))
    assert report.note.endswith("without search.num_workers")
    wrapper["tool_configs"] = [{"tool_id": "browser", "tool_args": {}}]
    text = json.dumps({"custom_envs": {"Guess": env}, "train_env_manager": {"tags": ["Guess"]}})
    imported = import_roll(write_variant(tmp_path, text))
    assert imported.tree["custom_envs"]["Guess"]["env_type"] == "gem"
    (report,) = [each.outcome for each in imported.keys if each.key == ("custom_envs", "Guess", "tool_wrapper")]
    assert report.status == "no counterpart"


@pytest.mark.parametrize(
    ("configs", "status", "note"),
    [
        ([{"tool_id": "search", "tool_args": {"timeout": None}}], "renamed", "variable SEARCH_URL"),
        ([{"tool_id": "python_code", "tool_args": {"timeout": None}}], "renamed", "env_config.env_config"),
        (["search"], "no counterpart", "no list of mappings with a tool_id"),
        ({"tool_id": "search"}, "no counterpart", "no list of mappings with a tool_id"),
    ],
)
def test_what_a_tool_wrapper_lacks_is_reported(configs: object, status: str, note: str, tmp_path: Path):
    env = {"env_type": "game:GuessTheNumber-v0", "max_steps": 3, "tool_wrapper": {"tool_configs": configs}}
    text = json.dumps({"custom_envs": {"Guess": env}, "train_env_manager": {"tags": ["Guess"]}})
    imported = import_roll(write_variant(tmp_path, text))
    (outcome,) = [each.outcome for each in imported.keys if each.key == ("custom_envs", "Guess", "tool_wrapper")]
    assert outcome.status == status
    assert outcome.note.endswith(note)


@pytest.mark.parametrize(
    ("engine", "temperature", "tokens", "status"),
    [
        ({"temperature": 0.5}, 0.5, 64, "no effect"),  # max_tokens_per_step, below ROLL's 8192
        ({"temperature": 0.5, "max_new_tokens": 32}, 0.5, 32, "no effect"),
        (None, 0.99, 128, "same"),
    ],
)
def test_the_engines_sampling_is_that_of_both_managers(
    engine: dict[str, object] | None, temperature: float, tokens: int, status: str, tmp_path: Path
):
    """As ROLL's AgenticConfig has it."""
    text = f"actor_infer: {{generating_args: {json.dumps(engine)}}}" if engine else "seed: 1"
    imported = import_roll(write_variant(tmp_path, text))
    config = validate_tree(imported.tree)
    sampling = config.train_env_manager.generating_args, config.actor_infer.generating_args
    assert next(each.temperature for each in sampling if each.temperature is not None) == temperature
    assert next(each.max_new_tokens for each in sampling if each.max_new_tokens is not None) == tokens
    managers = {f"{name}_env_manager.generating_args.temperature" for name in ("train", "val")}
    assert {each.outcome.status for each in imported.keys if ".".join(each.key) in managers} == {status}


JUDGE = """
reward:
  name: deep eyes
  worker_cls: roll.pipeline.base_worker.InferWorker
  model_args: {model_name_or_path: Qwen/Qwen2.5-72B-Instruct, dtype: bf16}
  generating_args: {temperature: 0.3}
  data_args: {template: qwen2_5}
  strategy_args: {strategy_name: vllm, strategy_config: {tensor_parallel_size: 4, load_format: auto}}
  device_mapping: list(range(12,16))
"""
"""As in examples/agentic_deepeyes/deepeyes.yaml."""


def test_the_model_that_an_agentic_env_asks_judges_its_episodes(tmp_path: Path):
    imported = import_roll(write_variant(tmp_path, JUDGE))
    (judge,) = imported.tree["rewards"]
    assert (judge["name"], judge["kind"], judge["device"]) == ("deep-eyes", "llm_judge", "cuda")
    assert judge["model_args"] == {"model_name_or_path": "Qwen/Qwen2.5-72B-Instruct", "dtype": "bfloat16"}
    assert judge["strategy_args"]["strategy_config"]["tensor_parallel_size"] == 4
    notes = {".".join(each.key): str(each) for each in imported.keys}
    assert "judges the whole episode" in notes["reward.model_args.model_name_or_path"]
    assert outcomes(imported)["reward.data_args.template"][0] == "no effect"
    trial = make_trial(imported.tree)
    assert (trial["rewards"][0]["kind"], check_imported(trial)) == ("regex", [])


def test_a_reward_without_devices_is_none_in_roll(tmp_path: Path):
    imported = import_roll(write_variant(tmp_path, JUDGE.replace("list(range(12,16))", "[]")))
    assert "rewards" not in imported.tree
    assert outcomes(imported)["reward.model_args.model_name_or_path"] == ("no effect", None)

"""Files of prime-rl 0.8 become ours, by the names, meanings and defaults of its configuration classes."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.cli.config_import import ImportFailedError, import_files
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.importing.prime_rl import import_prime_rl
from offbeat.deploy.config.importing.report import Imported
from offbeat.deploy.config.importing.rules import get
from offbeat.deploy.config.importing.trial import make_trial
from offbeat.deploy.config.loader import validate_tree

REVERSE_TEXT = """
max_steps = 20
seq_len = 2048

[deployment]
num_train_gpus = 1
num_infer_gpus = 2

[model]
name = "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT"

[monitors.wandb]
project = "reverse-text"
name = "reverse-text"

[orchestrator]
batch_size = 128
group_size = 16

[orchestrator.train.sampling]
max_completion_tokens = 128

[[orchestrator.train.source]]
name = "reverse-text"

[orchestrator.train.source.env.taskset]
id = "reverse-text"

[orchestrator.train.source.env.agent.harness]
id = "null"

[orchestrator.train.source.env.agent.runtime]
type = "subprocess"

[trainer.optim]
lr = 3e-6

[ckpt] # Checkpoint at the end of training

[inference]

[orchestrator.renderer]
name = "prime-qwen3"
"""
"""`examples/basic/reverse-text/rl.toml`, with GPUs."""
SFT = """
max_steps = 20
[ckpt]
[model]
name = "PrimeIntellect/Qwen3-1.7B"
[data]
name = "willcb/V3-wordle"
seq_len = 1024
batch_size = 64
micro_batch_size = 1
[optim]
lr = 1e-5
"""
"""`examples/basic/wordle/sft.toml`."""
TRAINER = '[model]\nname = "org/model"\nseq_len = 2048\n[optim]\nlr = 3e-6\n[ckpt]\n'
ORCHESTRATOR = """
max_steps = 20
seq_len = 2048
batch_size = 128
group_size = 16
[model]
name = "org/model"
[train.sampling]
max_completion_tokens = 128
[[train.source]]
name = "reverse-text"
[train.source.env.taskset]
id = "reverse-text"
"""
INFERENCE = '[vllm]\nmodel = "org/model"\ntensor_parallel_size = 2\n'
"""Parts as in `k8s/prime-rl/examples/reverse-text`."""
SOURCE = '[[orchestrator.train.source]]\nenv = { taskset = { id = "reverse-text" } }\n'


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def convert(folder: Path, text: str) -> Imported:
    return import_prime_rl([write(folder, "rl.toml", text)])


def statuses(imported: Imported) -> dict[str, str]:
    return {".".join(each.key): each.outcome.status for each in imported.keys if each.key}


def notes(imported: Imported) -> dict[str, str]:
    return {".".join(each.key): each.outcome.note for each in imported.keys if each.key}


def test_a_run_trains_as_prime_rl_does(tmp_path: Path):
    imported = convert(tmp_path, REVERSE_TEXT)
    expected: dict[str, Any] = {
        "pretrain": "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT",
        "sequence_length": 2048,
        "max_steps": 20,
        "rollout_batch_size": 128,
        "train_env_manager": {"group_size": 16, "num_env_groups": 8},
        "adv_estimator": "dr_grpo",  # less the group's mean, without its deviation
        "pg_variant": "dppo_tv",
        "max_staleness": 2,
        "buffer": {"stale_policy": "train"},
        "eval_steps": 0,
        "actor_infer.device_mapping": [0, 1],
        "actor_train.device_mapping": [2],
        "actor_train.model_args": {"dtype": "bfloat16", "disable_gradient_checkpointing": False},
        "actor_train.training_args": {
            "learning_rate": 3e-6, "adam_beta2": 0.999, "weight_decay": 0.01, "decay_all_weights": True,
        },
        "custom_envs.reverse-text.env_config": {
            "id": "reverse-text", "played_by": "agent", "split": "any",
            "environment": {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}},
        },
        "custom_envs.reverse-text.max_tokens_per_step": 128,
        "tracker_kwargs.wandb": {"project": "reverse-text", "name": "reverse-text"},
    }  # fmt: skip
    assert {key: get(imported.tree, key) for key in expected} == expected
    found = statuses(imported)
    assert found["max_steps"] == "same"
    assert found["orchestrator.train.source.0.env.taskset.id"] == "renamed"
    assert found["orchestrator.renderer.name"] == "no counterpart"
    config = validate_tree(imported.tree)
    assert config.custom_envs["reverse-text"].agent_runner is not None


def test_every_key_has_a_line(tmp_path: Path):
    found = statuses(convert(tmp_path, REVERSE_TEXT))
    assert len(found) == REVERSE_TEXT.count(" = ") + 2  # and two empty tables


def test_a_run_without_keys_has_prime_rls_defaults(tmp_path: Path):
    tree = convert(tmp_path, SOURCE).tree
    expected: dict[str, Any] = {
        "pretrain": "Qwen/Qwen3-0.6B",
        "sequence_length": 2048,
        "max_steps": 1_000_000,
        "rollout_batch_size": 128,
        "train_env_manager": {"group_size": 1, "num_env_groups": 128},
        "actor_train.training_args.learning_rate": 1e-6,
        "actor_infer.generating_args.max_new_tokens": 2047,
        "custom_envs.reverse-text.max_tokens_per_step": 2047,
    }
    assert {key: get(tree, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("lines", "key", "expected"),
    [
        ('[trainer.optim]\nmax_norm = "None"', "actor_train.training_args.max_grad_norm", 1e9),
        ("[trainer.model]\nfull_offload = true", "actor_train.training_args.max_grad_norm", 1e9),
        ("[trainer.model]\nac = 'None'\nac_offloading = 'None'", "actor_train.model_args", {"dtype": "bfloat16"}),
        ("[trainer.model]\ncp = 4", "actor_train.strategy_args",
         {"strategy_name": "fsdp2_train", "ulysses_size": 4}),
        ("[trainer.scheduler]\ntype = 'constant'", "actor_train.training_args.warmup_steps", None),
        ("[trainer.scheduler]\ntype = 'cosine'", "actor_train.training_args.warmup_steps", 10),
        ("[trainer.scheduler]\ntype = 'cosine'\nmin_lr = 1e-7", "actor_train.training_args.lr_scheduler_type",
         "cosine_with_min_lr"),
        ("[trainer.scheduler]\ntype = 'linear'\nwarmup_steps = 5\ndecay_steps = 0",
         "actor_train.training_args.lr_scheduler_type", "constant_with_warmup"),
        ("[trainer.optim]\nlr = 1e-5\n[trainer.scheduler]\ntype = 'linear'\nmin_lr = 1e-6",
         "actor_train.training_args.lr_scheduler_kwargs",
         {"num_decay_steps": 10, "decay_type": "linear", "min_lr_ratio": 0.1}),
        ("[trainer.loss]\ndppo_mask_high = 0.3\nkl_tau = 0.0", "dppo_kl_tau", 0.0),
        ("[trainer.loss]\ntype = 'ipo'", "dppo_mask_high", 0.1),
        ("[trainer.loss]\ntype = 'ipo'\nipo_threshold = 0.3", "dppo_mask_low", 0.3),
        ("[trainer.model.lora]", "actor_train.model_args.lora_rank", 16),
        ("[trainer.model.lora]\ntarget_modules = ['q_proj', 'experts']", "actor_train.model_args.lora_target", "q_proj"),
        ("[trainer]\ndist_timeout_seconds = 7200", "actor_train.backend_timeout", 120.0),
        ("[trainer]\nenable_router_replay = true", "router_replay", True),
        ("[ckpt]\ninterval = 50", "max_ckpt_to_keep", 1_000_000),
        ("[ckpt]\ninterval = 50\nkeep_last = 1", "max_ckpt_to_keep", 1),
        ("[run]\nname = 'a run'", "exp_name", "a-run"),
        ("output_dir = '/shared/outputs'\n[run]\nname = 'x'", "output_dir", "/shared/outputs/x"),
        ("[env_vars]\nA = 'b'", "system_envs", {"A": "b"}),
        ("[orchestrator.train]\nfilter_zero_advantages = false", "zero_variance", "train"),
        ("[orchestrator.algo]\ntype = 'max_rl'", "adv_estimator", "maxrl"),
        ("[orchestrator.algo]\ntype = 'rae'", "reward_normalization", {"norm_mean_type": "running"}),
        ("[orchestrator]\nmax_off_policy_steps = 0", "max_staleness", 0),
        ("[orchestrator]\nmax_off_policy_steps = 0", "buffer.stale_policy", None),
        ("[orchestrator]\nmax_off_policy_steps = 32\nbatch_size = 256\n[orchestrator.concurrency]\nmax_inflight = 1536",
         "max_staleness", 7),
        ("[orchestrator]\ngroup_size = 8\n[orchestrator.concurrency]\nmax_inflight = 1024",
         "train_env_manager.num_env_groups", 128),
        ("[orchestrator]\ngroup_size = 8\n[orchestrator.concurrency]\nmax_inflight = 64",
         "train_env_manager.num_env_groups", 16),  # at least a batch, as Offbeat requires
        ("[inference.vllm]\ntensor_parallel_size = 4\ndata_parallel_size = 2", "actor_infer.num_replicas", 2),
        ("[inference.vllm]\ntool_call_parser = 'hermes'", "custom_envs.reverse-text.agent_runner.tool_call_parser",
         "hermes"),
        ("[orchestrator.train.sampling]\nmax_completion_tokens = 4096", "custom_envs.reverse-text.max_tokens_per_step",
         2047),
    ],
)  # fmt: skip
def test_an_option_of_a_run(lines: str, key: str, expected: object, tmp_path: Path):
    tree = convert(tmp_path, f"{lines}\n{SOURCE}").tree
    assert get(tree, key) == expected
    group = {"group_size": max(2, tree["train_env_manager"]["group_size"])}
    validate_tree({**tree, "train_env_manager": {**tree["train_env_manager"], **group}})


def test_the_orchestrators_length_counts(tmp_path: Path):
    """The trainer's is that of a packed pass."""
    tree = convert(tmp_path, f"[trainer.model]\nseq_len = 16384\n{SOURCE}").tree
    assert tree["sequence_length"] == 2048
    assert tree["actor_train"]["training_args"]["max_tokens_per_microbatch"] == 16384


def test_sources_share_groups_by_their_ratios(tmp_path: Path):
    text = "\n".join(
        f'[[orchestrator.train.source]]\nname = "{name}"\nratio = {ratio}\nenv = {{ taskset = {{ id = "{name}" }} }}'
        for name, ratio in (("math", 0.75), ("code", 0.25))
    )
    imported = convert(tmp_path, f"[orchestrator]\nbatch_size = 128\ngroup_size = 16\n{text}")
    assert imported.tree["train_env_manager"] == {
        "group_size": 16, "num_env_groups": 8, "tags": ["math", "code"], "num_groups_partition": [6, 2],
    }  # fmt: skip
    validate_tree(imported.tree)


def test_groups_that_train_nothing_are_replaced_with_a_gate(tmp_path: Path):
    """A rejected group does not count in prime-rl's batch."""
    gate = "curriculum = { gates = { zero_advantage = { type = 'advantage_range' } } }\n"
    assert convert(tmp_path, SOURCE + gate).tree["zero_variance"] == "refill"
    bounded = convert(tmp_path, SOURCE + gate.replace("range'", "range', reject_max = 0.5"))
    assert "zero_variance" not in bounded.tree
    assert "query_filter_config" in notes(bounded)["orchestrator.train.source.0.curriculum.gates.zero_advantage.type"]


def test_evaluation_has_sources_of_its_own(tmp_path: Path):
    evaluation = """
[orchestrator.eval]
interval = 20
num_examples = 16
[orchestrator.eval.sampling]
temperature = 0.6
[[orchestrator.eval.source]]
name = "reverse-text"
env = { taskset = { id = "reverse-text" } }
[[orchestrator.eval.source]]
name = "aime"
env = { taskset = { id = "aime24" }, agent = { timeout = { rollout = 7200 } } }
"""
    tree = convert(tmp_path, SOURCE.replace("env", 'name = "reverse-text"\nenv') + evaluation).tree
    assert list(tree["custom_envs"]) == ["reverse-text", "aime"]
    assert tree["custom_envs"]["aime"]["agent_runner"]["timeout_s"] == 7200.0
    assert tree["custom_envs"]["aime"]["episode_timeout_s"] == 7200.0
    assert (tree["eval_steps"], tree["val_batch_size"], tree["final_val_batch_size"]) == (20, 32, 32)
    assert tree["val_env_manager"] == {"generating_args": {"temperature": 0.6}, "group_size": 1}
    assert tree["train_env_manager"]["tags"] == ["reverse-text"]


def test_an_env_of_evaluation_that_differs_has_another_tag(tmp_path: Path):
    evaluation = '[[orchestrator.eval.source]]\nenv = { taskset = { id = "reverse-text", size = 4 } }\n'
    tree = convert(tmp_path, SOURCE + evaluation).tree
    assert tree["custom_envs"]["reverse-text-eval"]["env_config"]["taskset"] == {"size": 4}
    assert tree["val_env_manager"]["tags"] == ["reverse-text-eval"]


def test_a_teacher_is_distilled_from(tmp_path: Path):
    text = '[orchestrator.algo]\ntype = "opd"\n[orchestrator.algo.teacher]\nname = "org/teacher"\nbase_url = "http://a/v1"\n'
    imported = convert(tmp_path, f"{text}{SOURCE}")
    assert (imported.tree["adv_estimator"], imported.tree["dppo_mask_high"]) == ("opd", 1.0)
    assert imported.tree["teacher"] == {"teacher": {"model_args": {"model_name_or_path": "org/teacher"}}}
    validate_tree(imported.tree)
    sft = text.replace('"opd"', '"sft"')
    assert statuses(convert(tmp_path, f"{sft}{SOURCE}"))["orchestrator.algo.type"] == "no counterpart"


def test_a_name_of_an_older_prime_rl_is_reported_with_the_new_one(tmp_path: Path):
    imported = convert(tmp_path, f"[orchestrator]\nrollouts_per_example = 8\n{SOURCE}")
    assert notes(imported)["orchestrator.rollouts_per_example"].endswith("write orchestrator.group_size")


def test_fine_tuning_becomes_sft(tmp_path: Path):
    imported = import_prime_rl([write(tmp_path, "sft.toml", SFT)])
    tree = imported.tree
    assert (tree["pipeline"], tree["rollout_batch_size"], tree["sequence_length"]) == ("sft", 64, 1024)
    assert tree["data"] == {"dataset_name": "willcb/V3-wordle", "too_long": "truncate", "response_key": "completion"}
    assert tree["actor_train"]["training_args"]["learning_rate"] == 1e-5
    assert any("packs rows" in remark for remark in imported.remarks)
    validate_tree(tree)


@pytest.mark.parametrize(
    ("lines", "name", "status"),
    [
        ("subsets = ['main']\nsplits = ['train']", "org/rows:main/train", "same"),
        ("splits = ['train']", "org/rows:train", "same"),
        ("splits = ['a', 'b']", "org/rows", "no counterpart"),
    ],
)
def test_rows_of_one_split_are_named(lines: str, name: str, status: str, tmp_path: Path):
    imported = import_prime_rl([write(tmp_path, "sft.toml", f"[data]\nname = 'org/rows'\n{lines}\n")])
    assert imported.tree["data"]["dataset_name"] == name
    assert statuses(imported)["data.splits"] == status
    assert imported.tree["sequence_length"] == 128


def test_parts_of_a_run_are_one_configuration(tmp_path: Path):
    parts = {"train.toml": TRAINER, "orch.toml": ORCHESTRATOR, "infer.toml": INFERENCE}
    files = [write(tmp_path, name, text) for name, text in parts.items()]
    out, lines = tmp_path / "run.yaml", list[str]()
    import_files("prime-rl", files, out, force=False, trial=False, echo=lines.append)
    imported = import_prime_rl(files)
    assert out.is_file()
    assert "  trainer.optim.lr -> actor_train.training_args.learning_rate" in lines
    assert imported.tree["pretrain"] == "org/model"
    assert get(imported.tree, "actor_infer.strategy_args.strategy_config.tensor_parallel_size") == 2
    assert imported.tree["train_env_manager"]["group_size"] == 16
    validate_tree(imported.tree)
    alone = import_prime_rl(files[1:2])
    assert any("orchestrator alone" in remark for remark in alone.remarks)


def test_runs_of_several_files_need_a_folder(tmp_path: Path):
    files = [write(tmp_path, name, REVERSE_TEXT) for name in ("a.toml", "b.toml")]
    import_files("prime-rl", files, tmp_path / "out", force=False, trial=True, echo=lambda _: None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.yaml", "b.yaml"]


def test_a_trial_is_valid_on_a_cpu(tmp_path: Path):
    text = f"[trainer.model]\ncp = 4\n[inference.vllm]\ntool_call_parser = 'hermes'\n{REVERSE_TEXT}".replace(
        "[inference]\n", ""
    )
    tree = make_trial(convert(tmp_path, text).tree)
    config = validate_tree(tree)
    assert (config.pretrain, config.actor_train.strategy_args.ulysses_size) == ("tiny", 1)
    runner = config.custom_envs["reverse-text"].agent_runner
    assert runner is not None
    assert runner.tool_call_parser is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = [", "no TOML"),
        ('model = "deepseek/v4"\n[[eval.source]]\nname = "a"\n', "`offbeat rollout` evaluates"),
    ],
)
def test_a_file_without_a_run_is_refused(text: str, message: str, tmp_path: Path):
    path = write(tmp_path, "x.toml", text)
    with pytest.raises(ConfigError, match=message):
        import_prime_rl([path])
    with pytest.raises(ImportFailedError, match=message):
        import_files("prime-rl", [path], tmp_path / "x.yaml", force=False, trial=False, echo=lambda _: None)

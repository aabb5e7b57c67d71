from pathlib import Path

import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.run_setup import identify_base, make_log_folder, run_spec, worker_settings
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.integration.policy_weights import random_policy
from tests.paths import QUICKSTART


def test_logging_dir_holds_the_logs_and_the_run_links_to_it(tmp_path: Path):
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}/run", f"logging_dir={tmp_path}/logs/quickstart"])
    for _ in range(2):
        (make_log_folder(config) / "learner.log").write_text("here")
    assert (tmp_path / "logs" / "quickstart" / "learner.log").read_text() == "here"
    assert (tmp_path / "run" / "logs").is_symlink()


@pytest.mark.parametrize("logging_dir", [None, "{run}/logs"])
def test_logs_are_in_the_run_by_default(logging_dir: str | None, tmp_path: Path):
    run = tmp_path / "run"
    more = [f"logging_dir={logging_dir.format(run=run)}"] if logging_dir else []
    logs = make_log_folder(load_run(QUICKSTART, [f"output_dir={run}", *more]))
    assert (logs, logs.is_symlink(), logs.is_dir()) == (run / "logs", False, True)


def test_system_envs_reach_the_workers_as_text():
    config = load_run(QUICKSTART, ["+system_envs={USE_MODELSCOPE: 1, DEBUG: true, NAME: x}"])
    expected = {"USE_MODELSCOPE": "1", "DEBUG": "true", "NAME": "x"}
    assert worker_settings(config, "redis://127.0.0.1:1/0").environment == config.environment == expected


ADAPTER = ("+actor_train.model_args.lora_target=all-linear", "actor_infer.max_lora_rank=8")


def base(*overrides: str, app: str = "engines", warm_start: str = "warm_start=null") -> str:
    return run_spec(load_run(QUICKSTART, [*ADAPTER, warm_start, f"actor_infer.app={app}", *overrides])).base


def test_runs_have_one_base_if_they_start_from_the_same_weights():
    assert base() == base("exp_name=other", "actor_infer.max_lora_rank=16", "train_env_manager.group_size=4")
    others = {base(each) for each in ("seed=7", "tiny.hidden_size=128", "actor_train.model_args.dtype=bfloat16")}
    assert len({base(), *others}) == 4
    args = "actor_train.model_args"
    bits = [f"{args}.load_in_4bit=true"]
    quantized = [bits, [*bits, f"{args}.use_bnb_nested_quant=true"], [*bits, f"{args}.bnb_4bit_quant_type=fp4"]]
    assert len({base(), *(base(*each) for each in quantized)}) == 4
    assert base(*bits, f"{args}.lora_rank=4") == base(*bits)
    assert base(warm_start="warm_start.steps=9") == base(app="null") == base(app="generation-quickstart") == ""
    config = load_run(QUICKSTART, ["warm_start=null", "actor_infer.app=engines"])
    assert run_spec(config).base == identify_base(config) == ""
    assert worker_settings(load_run(QUICKSTART, [*ADAPTER, "actor_infer.app=engines"]), "").names_run
    assert not worker_settings(config, "").names_run


def test_a_models_files_show_its_base_wherever_they_are(tmp_path: Path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        write_tiny_policy(folder, TinyPolicyConfig(), [f"w{i}" for i in range(25)])
        random_policy(folder, 3).save_pretrained(folder)
    weights = bytearray((folders[2] / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folders[2] / "model.safetensors").write_bytes(weights)
    bases = [base(f"pretrain={folder}", "seed=5") for folder in folders]
    assert bases[0] == bases[1] != bases[2]
    assert base(f"pretrain={folders[0]}", "seed=6") == bases[0]

"""ROLL's own agentic example trains without the importer, by ROLL's command, with a small model of its architecture; its
RLVR and distillation examples train after their import, with model, devices, sizes and rows replaced.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

from offbeat.deploy.config.importing.roll import import_roll
from offbeat.deploy.config.importing.trial import make_trial
from offbeat.deploy.config.loader import load_run
from offbeat.services.chat.tokenizer import load_tokenizer
from tests.integration.data_run import a_worker
from tests.integration.learner_run import killed_at_exit, prepared_run
from tests.paths import ROOT
from tests.qwen2 import STOP, write_qwen2

ROLL = ROOT / "tests/deploy/config/importing/roll"
FILE = ROLL / "agentic" / "agent_val_frozen_lake.yaml"
WORDS = ["length_constraints:number_words"]
DIRECTIONS = ("Left", "Down", "Right", "Up")
MAX_TOKENS = 48
"""Of a random policy's answers 2 % are longer, cut and masked; with 6 tokens 62 %, at times all that had a signal."""


def write_player(folder: Path) -> None:
    """Write a Qwen2 without memory, whose next token depends on the last one: it mostly answers `<answer>Left</answer>` or
    another direction, so that rewards differ.
    """
    from transformers import Qwen2ForCausalLM

    write_qwen2(folder, [FILE.read_text(), "<answer>" + "</answer>\n<answer>".join(DIRECTIONS * 50)])
    tokenizer = load_tokenizer(folder)
    model = Qwen2ForCausalLM.from_pretrained(folder, tie_word_embeddings=False, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.copy_(torch.nn.functional.normalize(torch.randn(embedding.shape, generator=generator)))
        for direction in DIRECTIONS:
            ids = [*tokenizer.encode(f"\n<answer>{direction}</answer>"), tokenizer.convert_tokens_to_ids(STOP)]
            for last, following in set(pairwise(ids)):
                head[following] += embedding[last]
        head.mul_(2.0 / head.norm(dim=1, keepdim=True).clamp_min(1e-6))
    model.config.tie_word_embeddings = False
    model.bfloat16().save_pretrained(folder)


def replaced(model: Path, run: Path) -> Sequence[str]:
    """Return paths, sizes, devices and the strategy as overrides."""
    return (
        *(f"pretrain={model}", f"reward_pretrain={model}", f"output_dir={run}", f"logging_dir={run / 'own-logs'}"),
        *(f"render_save_dir={run / 'render'}", f"checkpoint_config.output_dir={run.with_name('store')}"),
        f"tracker_kwargs.log_dir={run / 'tensorboard'}",
        *(f"{role}.device_mapping=null" for role in ("actor_train", "actor_infer", "reference")),
        *("rollout_batch_size=8", "val_batch_size=4", "final_val_batch_size=4", "sequence_length=2048", "max_steps=2"),
        *("train_env_manager.num_env_groups=2", "train_env_manager.group_size=4"),
        "train_env_manager.num_groups_partition=[2]",
        *("val_env_manager.num_env_groups=4", "val_env_manager.num_groups_partition=[1,1,1,1]"),
        *("actor_train.training_args.gradient_accumulation_steps=4", "actor_infer.kv_cache_gib=0.25"),
        "actor_train.strategy_args.strategy_name=fsdp2_train",
    )


@pytest.mark.parametrize("strategy", ["fsdp2_train", "deepspeed_train"])
def test_rolls_file_is_valid(strategy: str, tmp_path: Path):
    write_qwen2(tmp_path / "model", [FILE.read_text()])
    values = [*replaced(tmp_path / "model", tmp_path / "run"), f"actor_train.strategy_args.strategy_name={strategy}"]
    config = load_run(FILE, values)
    train = config.actor_train
    assert (train.model_args.disable_gradient_checkpointing, train.model_args.attn_implementation) == (False, "auto")
    assert train.strategy_args.zero_stage == (1 if strategy == "deepspeed_train" else 0)
    assert (train.strategy_args.strategy_config, config.old_logprobs) == ({}, "recompute")
    assert config.custom_envs["FrozenLake"].env_config["max_steps"] == 10


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_rolls_file_trains(tmp_path: Path):
    write_player(tmp_path / "model")
    run = tmp_path / "run"
    named = ["--config-path", str(FILE.parent), "--config-name", FILE.stem]
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "train", *named, *replaced(tmp_path / "model", run)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((run / "report.json").read_text())
    assert (report["steps"], report["groups_trained"]) == (2, 4)
    assert {path.name for path in (run / "render").iterdir()} == {"step-0", "step-2"}
    assert list((run / "tensorboard").iterdir())
    assert (run / "own-logs" / "learner.out").is_file()
    assert list(tmp_path.glob("store/*/manifest-*"))


def import_trial(kind: str, rows: Sequence[object], folder: Path) -> Path:
    """Import ROLL's file of a kind; return it with another model, devices, rows and folders."""
    (file,) = (ROLL / kind).iterdir()
    tree = make_trial(import_roll(file).tree)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    tree["data"] |= {"dataset_name": str(data), "val_dataset_name": str(data)}
    tree |= {"exp_name": "imported", "output_dir": str(folder / "run"), "logging_dir": str(folder / "run" / "logs")}
    tree |= {"max_steps": 2, "save_steps": 2, "eval_steps": 0, "rollout_batch_size": 8}
    if kind == "rlvr":
        # a judge and a sandbox are no part of this test
        kept = ("math_rule", "crossthinkqa", "ifeval")
        tree["custom_envs"] = {tag: {**tree["custom_envs"][tag], "max_tokens_per_step": MAX_TOKENS} for tag in kept}
        tree["rewards"] = [reward for reward in tree["rewards"] if reward["name"] in kept]
        for key in ("domain_interleave_probs", "tag_included"):
            tree["data"][key] = {tag: tree["data"][key][tag] for tag in kept}
        tree["data"]["domain_interleave_probs"] = {"math_rule": 0.25, "crossthinkqa": 0.25, "ifeval": 0.5}
        tree["data"]["prompt_length"] = 32
        tree |= {"sequence_length": 96, "train_env_manager": {"group_size": 2, "num_env_groups": 4}}
        tree["tracker_kwargs"] = {"tensorboard": {"log_dir": str(folder / "run" / "tensorboard")}}
        tree["actor_infer"]["generating_args"]["max_new_tokens"] = MAX_TOKENS
        tree["actor_infer"]["strategy_args"] = {"strategy_name": "hf_infer"}
        tree["actor_train"]["training_args"]["num_minibatches"] = 2
        tree["zero_variance"] = "train"
        for key in ("mask", "low_threshold", "high_threshold"):  # it would leave out what a random policy answers
            del tree[f"difficulty_{key}"]
    path = folder / "imported.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True))
    return path


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_rolls_rlvr_file_trains_after_its_import(tmp_path: Path):
    # by every answer or by none, so that rewards differ within a tag, over which ROLL whitens
    lengths = [{"kwargs": [{"relation": relation, "num_words": 100}]} for relation in ("less than", "at least")]
    rows = [
        *({"prompt": f"{n} + 2 =", "ground_truth": str(n + 2), "tag": "deepmath_103k"} for n in range(4)),
        *({"prompt": f"<answer> {n} </answer>", "ground_truth": str(n), "tag": "crossthinkqa"} for n in range(2)),
        *(
            {"prompt": "say", "ground_truth": "", "tag": "ifeval", "instruction_id_list": WORDS, **each}
            for each in lengths
        ),
    ]
    file = import_trial("rlvr", rows, tmp_path)
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "train", str(file)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["pipeline"], report["steps"], report["groups_trained"]) == ("rlvr", 2, 8)
    assert report["tokens_trained"] > 0
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {name for record in records if record["source"] == "learner" for name in record["values"]}
    assert {f"env/{tag}/reward/{tag}" for tag in ("math_rule", "crossthinkqa", "ifeval")} <= names


@pytest.mark.slow
def test_rolls_distillation_file_trains_after_its_import(redis_server: str, tmp_path: Path):
    rows = [{"question_zh": f"{n} 加 二", "answer_zh": f"等于 {n + 2}"} for n in range(16)]
    config = load_run(import_trial("distill", rows, tmp_path), ["tiny.num_hidden_layers=1"])
    assert config.distill.logits_topk == 64
    with prepared_run(redis_server, config) as run, killed_at_exit(run.learners), a_worker(run, "worker"):
        assert run.start().wait(timeout=240) == 0, run.complaint()
        assert (run.published(), run.counters().trained) == (2, 16)
        steps = [record.values for record in run.records() if record.source == "learner" and "loss" in record.values]
    assert len(steps) == 2
    for values in steps:
        parts = 0.15 * values["sft_loss"].value + 0.85 * values["kd_loss"].value  # distill_loss_weight
        assert values["loss"].value == pytest.approx(parts, rel=1e-5)

"""Runs that start from an adapter of PEFT's: version 0, reference, resume, export, and reproduction, on every engine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from offbeat.deploy import run_setup
from offbeat.deploy.cli.app import app
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.model_export import export_adapter
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.lora import named_weights
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from tests.fakes import make_group, train_on
from tests.integration.test_learner_policy_trainer import (
    FSDP2,
    REFERENCE,
    STAGE_3,
    assert_equal,
    begun,
    run_of,
    weights,
)
from tests.paths import CONFIGS
from tests.trainer.peft_adapter import write_adapter

GROUPS = [make_group(n, rewards=(0.0, 1.0, 0.5)) for n in range(3)]
ARGS = ModelArgs(lora_target="q_proj,v_proj,down_proj", lora_rank=3, lora_alpha=5.0, use_rslora=True)
KL = (*REFERENCE, "use_kl_loss=true", "kl_loss_coef=0.1")
DPO = ("eval_steps=0", "data.val_dataset_name=null", "dpo.precompute_ref_log_probs=true")
BF16 = ("actor_train.model_args.dtype=bfloat16", "actor_infer.model_args.dtype=float32")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(alone := ranks_of_environment("cpu")):
        yield alone


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    sizes = TinyPolicyConfig(num_hidden_layers=1)
    write_tiny_policy(folder, sizes, [*"abcdefghijklmnop", "left", "right"])
    load_policy(folder, ModelArgs(), seed=1).model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(base, tmp_path_factory.mktemp("adapter") / "sft", ARGS)


def started(folder: Path, base: Path, adapter: Path, *overrides: str):
    own = (f"pretrain={base}", "~tiny", "warm_start=null", f"actor_train.model_args.adapter_name_or_path={adapter}")
    engine = "actor_infer.strategy_args.strategy_name=hf_infer"
    return run_of(folder, (*own, engine, "custom_envs.FrozenLake.env_instruction=a", *overrides))


def merged_by_peft(base: Path, adapter: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    whole = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    return {name: tensor.detach() for name, tensor in named_weights(whole)}


@pytest.mark.parametrize("engine", [(), STAGE_3, FSDP2], ids=["zero-0", "zero-3", "fsdp2"])
def test_a_run_starts_from_the_adapter_and_keeps_it_as_its_reference(
    tmp_path: Path, ranks: Ranks, base: Path, adapter: Path, engine: tuple[str, ...]
) -> None:
    run = started(tmp_path, base, adapter, *KL, *engine)
    args = run.config.actor_train.model_args
    assert (args.lora_rank, args.lora_alpha, args.use_rslora) == (3, 5.0, True)
    assert args.lora_target == "down_proj,q_proj,v_proj"
    trainer = begun(run, ranks)
    first = weights(trainer)
    for name, tensor in merged_by_peft(base, adapter).items():
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-6)
    gauges = [train_on(trainer, GROUPS, step) for step in range(2)]
    assert gauges[0]["actor/kl_loss"].value == pytest.approx(0.0, abs=1e-9)
    assert gauges[1]["actor/kl_loss"].value > 1e-6
    saved = tmp_path / "checkpoints" / "step-000002"
    saved.mkdir(parents=True)
    trainer.save(saved)
    export_adapter(saved, tmp_path / "exported", print)  # which compares it with the merged weights
    assert json.loads((tmp_path / "exported" / "adapter_config.json").read_text())["use_rslora"] is True
    again = PolicyTrainer(run, ranks)
    again.load(saved, trainer.kl_coef)
    assert train_on(again, GROUPS, 2) == train_on(trainer, GROUPS, 2)
    assert_equal(weights(again), weights(trainer))


@pytest.mark.parametrize("engine", [(), FSDP2], ids=["zero-0", "fsdp2"])
def test_a_bfloat16_policy_starts_at_no_distance_from_its_reference(
    tmp_path: Path, ranks: Ranks, base: Path, adapter: Path, engine: tuple[str, ...]
) -> None:
    trainer = begun(started(tmp_path, base, adapter, *KL, *engine, *BF16), ranks)
    gauges = [train_on(trainer, GROUPS, step) for step in range(2)]
    assert gauges[0]["actor/kl_loss"].value == pytest.approx(0.0, abs=1e-9)
    assert gauges[1]["actor/kl_loss"].value > 0


def test_the_first_published_adapter_is_the_folders(tmp_path: Path, ranks: Ranks, base: Path, adapter: Path) -> None:
    served = "actor_infer.strategy_args.strategy_config.max_lora_rank=3"
    run = started(tmp_path, base, adapter, served)
    assert run.config.adapter_settings is not None
    assert run.config.adapter_settings["use_rslora"] is True
    found = {name: tensor.clone() for name, tensor in begun(run, ranks).tensors(with_base=False)}
    assert_equal(found, load_file(adapter / "adapter_model.safetensors"))


def test_a_run_that_starts_from_an_exported_adapter_starts_where_it_ended(
    tmp_path: Path, ranks: Ranks, base: Path, adapter: Path
) -> None:
    first = begun(started(tmp_path / "first", base, adapter), ranks)
    train_on(first, GROUPS, 0)
    saved = tmp_path / "first" / "checkpoints" / "step-000001"
    saved.mkdir(parents=True)
    first.save(saved)
    export_adapter(saved, tmp_path / "exported", print)
    second = begun(started(tmp_path / "second", base, tmp_path / "exported"), ranks)
    assert_equal(weights(second), weights(first))


@pytest.mark.parametrize(
    ("key", "value"),
    [("lora_alpha", 7.0), ("use_rslora", True), ("bnb_4bit_quant_type", "fp4"), ("load_in_4bit", False)],
)
def test_a_checkpoint_from_anywhere_is_loaded_at_its_scale_and_on_its_base_alone(
    tmp_path: Path, ranks: Ranks, key: str, value: object
) -> None:
    """The tensors of the state would fit, and be another policy."""
    args = {"lora_target": "q_proj,v_proj", "lora_rank": 4, "lora_alpha": 8.0, "load_in_4bit": True}
    changed = args | {key: value}

    def run(name: str, args: dict[str, object]) -> LearnerRun:
        keys = [f"actor_train.model_args.{each}={json.dumps(value)}" for each, value in args.items()]
        return run_of(tmp_path / name, (*keys, "warm_start=null"))

    trainer, folder = begun(run("first", args), ranks), tmp_path / "saved"
    folder.mkdir()
    trainer.save(folder)
    with pytest.raises(RuntimeError, match=rf"set actor_train\.model_args\.{key}="):
        PolicyTrainer(run("other", changed), ranks).load(folder, trainer.kl_coef)
    again = PolicyTrainer(run("same", args), ranks)
    assert again.load(folder, trainer.kl_coef)
    assert_equal(weights(again), weights(trainer))


@pytest.mark.parametrize("has_adapter", [True, False], ids=["adapter", "base"])
def test_distill_prepare_and_the_learner_score_the_same_reference(
    tmp_path: Path, ranks: Ranks, base: Path, adapter: Path, has_adapter: bool
) -> None:
    """Either finds the other's scores by their key."""
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "a b", "chosen": word, "rejected": "left"}) + "\n" for word in "cde"))
    overrides = [f"pretrain={base}", f"data.dataset_name={rows}", f"output_dir={tmp_path / 'run'}", *DPO]
    if has_adapter:
        overrides.append(f"actor_train.model_args.adapter_name_or_path={adapter}")
    result = CliRunner().invoke(app, ["distill", "prepare", str(CONFIGS / "dpo.yaml"), *overrides])
    assert "reference: 3 of 3 rows scored now" in result.output, result.output
    prepared = scores_beside(rows)
    config = load_run(CONFIGS / "dpo.yaml", overrides)
    run_setup.prepare_folder(config)
    begun(LearnerRun("run", "now", config.output_dir, config), ranks)
    computed = scores_beside(rows)
    assert prepared.keys() == computed.keys()
    assert_equal(prepared, computed)


def scores_beside(rows: Path) -> dict[str, Tensor]:
    """Remove a dataset's files of scores; return the reference's logprobs by key and row."""
    scores: dict[str, Tensor] = {}
    for file in sorted(rows.with_name(f"{rows.name}.scores").rglob("*.safetensors")):
        scores |= {f"{file.parent.name}/{row}": tensor for row, tensor in load_file(file).items()}
        file.unlink()
    return scores

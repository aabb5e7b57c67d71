"""Exported folders compute what the checkpoint computes, and are written only if they do."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig
from typer.testing import CliRunner, Result

from offbeat.deploy.cli.app import app
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.export import copy_model_files, export_weights
from offbeat.trainer.models.loading import load_policy, load_reward_model
from offbeat.trainer.models.lora import FACTORS, merged_weights, named_weights, save_adapter, unmerged_weights
from tests.families import write_family

ARGS = ModelArgs(lora_target="all-linear", lora_rank=3, lora_alpha=5.0)
WRAPPER = "model."


def offbeat(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Path:
    """A run whose newest checkpoint has an adapter on `policy`, as the learner saves it."""
    return write_run(folder, tmp_path, ARGS)


def write_run(folder: Path, tmp_path: Path, args: ModelArgs) -> Path:
    policy = load_policy(folder / "policy", args, seed=0)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    copy_model_files(folder / "policy", checkpoint)
    (checkpoint / "learner.json").write_text("{}")
    export_weights(checkpoint, ((w.name.removeprefix(WRAPPER), w.tensor()) for w in merged_weights(policy)))
    apart = {w.name: w.tensor() for w in unmerged_weights(policy, WRAPPER)}
    factors = {name: tensor for name, tensor in apart.items() if any(each in name for each in FACTORS)}
    save_adapter(checkpoint / "adapter", factors, args, folder / "policy")
    return tmp_path / "run"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(12)[None]).logits.float()


def test_a_reward_model_is_exported_with_its_head(folder: Path, tmp_path: Path):
    model, checkpoint = load_reward_model(folder / "policy", ModelArgs(), seed=0), tmp_path / "step-000004"
    checkpoint.mkdir()
    copy_model_files(folder / "policy", checkpoint)
    model.write_config(checkpoint)
    export_weights(checkpoint, model.model.state_dict().items())
    done = offbeat("export", checkpoint, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == f"vllm serve {tmp_path / 'out'} --runner pooling"
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(exported.score.weight, model.model.score.weight)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_merged_weights_are_those_of_the_checkpoint(run: Path, tmp_path: Path, dtype: str | None):
    out, checkpoint = tmp_path / "out", run / "checkpoints" / "step-000004"
    done = offbeat("export", run, "-o", out, *(("--dtype", dtype) if dtype else ()))
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == f"vllm serve {out}"
    kind = getattr(torch, dtype or "float32")
    exported, source = (AutoModelForCausalLM.from_pretrained(path, dtype=kind) for path in (out, checkpoint))
    assert torch.equal(logits(exported), logits(source))
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == kind
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(checkpoint).chat_template
    assert not (out / "learner.json").exists()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen3_moe"])
def test_experts_of_an_export_have_the_names_of_published_models(run: Path, tmp_path: Path, family: str):
    """Checkpoints of earlier builds have the stacked ones of transformers' models in memory, which vLLM's do not load."""
    checkpoint, published = run / "checkpoints" / "step-000004", tmp_path / "published"
    write_family(published, family)
    shutil.copy(published / "config.json", checkpoint)
    policy = load_policy(published, ModelArgs(), seed=0)
    export_weights(checkpoint, named_weights(policy.model))
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(checkpoint / "model.safetensors"))
    done = offbeat("export", checkpoint, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    policy.model.save_pretrained(published)
    expected, exported = (load_file(path / "model.safetensors") for path in (published, tmp_path / "out"))
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], each) for name, each in expected.items())


def test_a_checkpoint_without_its_buffers_is_not_exported(run: Path, tmp_path: Path):
    """As builds before 0.2 wrote them."""
    checkpoint = run / "checkpoints" / "step-000004"
    write_family(tmp_path / "glm", "glm4_moe")
    shutil.copy(tmp_path / "glm" / "config.json", checkpoint)
    export_weights(checkpoint, load_policy(tmp_path / "glm", ModelArgs(), seed=0).model.named_parameters())
    done = offbeat("export", checkpoint, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "lacks model.layers.1.mlp.gate.e_score_correction_bias" in done.output
    assert not (tmp_path / "out").exists()


def test_an_adapter_on_its_base_is_the_checkpoint(run: Path, folder: Path, tmp_path: Path):
    out, checkpoint = tmp_path / "out", run / "checkpoints" / "step-000004"
    done = offbeat("export", checkpoint, "-o", out, "--adapter")
    assert done.exit_code == 0, done.output
    served = f"vllm serve {folder / 'policy'} --enable-lora --max-lora-rank 8 --lora-modules policy={out}"
    assert done.output.splitlines()[-1] == served
    base = AutoModelForCausalLM.from_pretrained(folder / "policy")
    plain, merged = logits(base), logits(AutoModelForCausalLM.from_pretrained(checkpoint))
    adapted = logits(PeftModel.from_pretrained(base, str(out)).eval())
    assert (adapted - plain).abs().max() > 0.01
    torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=1e-4)
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in out.iterdir()}
    assert not (out / "config.json").exists()


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_an_adapter_on_its_quantized_base_is_the_checkpoint(folder: Path, tmp_path: Path, kind: str):
    """As transformers loads the base with the settings beside the adapter."""
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "use_bnb_nested_quant": True}
    run, out = write_run(folder, tmp_path, ARGS.model_copy(update=settings)), tmp_path / "adapter"
    done = offbeat("export", run, "-o", out, "--adapter")
    assert done.exit_code == 0, done.output
    assert str(out / "quantization_config.json") in done.output
    quantization = BitsAndBytesConfig.from_dict(json.loads((out / "quantization_config.json").read_text()))
    base = AutoModelForCausalLM.from_pretrained(
        folder / "policy", quantization_config=quantization, dtype=torch.float32
    )
    theirs = PeftModel.from_pretrained(base, out).train()  # else some CPUs compute in bfloat16
    found = theirs(torch.arange(12)[None]).logits
    merged = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-000004", dtype=torch.float32)
    torch.testing.assert_close(found, merged(torch.arange(12)[None]).logits, rtol=0, atol=1e-4)


def test_without_bitsandbytes_an_adapter_on_a_quantized_base_names_the_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, out = write_run(folder, tmp_path, ARGS.model_copy(update={"load_in_4bit": True})), tmp_path / "adapter"
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    done = offbeat("export", run, "-o", out, "--adapter")
    assert done.exit_code == 2, done.output
    assert "pip install 'offbeat[quantization]'" in " ".join(done.output.split())
    assert not out.exists()


@pytest.mark.parametrize(("target", "is_written"), [("o_proj", True), ("all-linear", False)])
def test_an_adapter_that_peft_takes_for_that_of_experts_is_not_written(
    run: Path, folder: Path, tmp_path: Path, target: str, is_written: bool
):
    """GLM-4.5 has dense layers and shared experts by the names of its experts, which PEFT looks for in stacked ones."""
    base, checkpoint = tmp_path / "base", run / "checkpoints" / "step-000004"
    shutil.copytree(folder / "policy", base)
    (base / "model.safetensors").unlink(missing_ok=True)
    write_family(base, "glm4_moe")
    load_policy(base, ModelArgs(), seed=0).model.save_pretrained(base)
    args = ModelArgs(lora_target=target, lora_rank=2)
    policy = load_policy(base, args, seed=0)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    shutil.rmtree(checkpoint / "adapter")
    shutil.copy(base / "config.json", checkpoint)
    export_weights(checkpoint, ((w.name.removeprefix(WRAPPER), w.tensor()) for w in merged_weights(policy)))
    apart = {w.name: w.tensor() for w in unmerged_weights(policy, WRAPPER)}
    factors = {name: tensor for name, tensor in apart.items() if any(each in name for each in FACTORS)}
    save_adapter(checkpoint / "adapter", factors, args, base)
    done = offbeat("export", run, "-o", tmp_path / "out", "--adapter")
    assert (done.exit_code == 0) is is_written, done.output
    assert ("export the merged weights (--merge)" in done.output) is not is_written
    assert offbeat("export", run, "-o", tmp_path / "merged").exit_code == 0


def test_an_adapter_of_another_base_is_not_written(run: Path, folder: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    copy_model_files(folder / "policy", other)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(folder / "policy").config).save_pretrained(
        other
    )
    file = run / "checkpoints" / "step-000004" / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(other)}))
    done = offbeat("export", run, "-o", tmp_path / "out", "--adapter")
    assert done.exit_code == 2
    assert "nothing was written" in done.output
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_what_can_not_be_exported_is_refused(run: Path, folder: Path, tmp_path: Path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    for arguments, says in (
        ((tmp_path / "nowhere", "-o", tmp_path / "out"), "there is no folder"),
        ((run, "-o", tmp_path / "taken"), "is there already"),
        ((run, "-o", tmp_path / "taken" / "mine" / "out"), "offbeat: [Errno 20] Not a directory"),
        ((folder / "policy", "-o", tmp_path / "out", "--adapter"), "holds no adapter"),
        ((run, "-o", tmp_path / "out", "--adapter", "--dtype", "float16"), "--dtype is of merged weights"),
    ):
        done = offbeat("export", *arguments)
        assert (done.exit_code, says in done.output) == (2, True), done.output
    assert not (tmp_path / "out").exists()

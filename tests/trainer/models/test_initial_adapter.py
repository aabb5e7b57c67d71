"""Adapters that start from a folder in PEFT's form: PEFT's logits, the frozen copy, and what does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.data.batch import microbatches, pack
from offbeat.trainer.engines.frozen import FirstPolicyReference
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.lora import merged_weights, save_adapter, unmerged_weights
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy
from tests.fakes import make_group
from tests.trainer.models.test_lora import trained
from tests.trainer.peft_adapter import write_adapter
from tests.trainer.plain_engine import PlainEngine

GROUPS = [make_group(n, rewards=(0.0, 1.0, 1.0, 0.5)) for n in range(3)]
SCALES = [
    ModelArgs(lora_target="q_proj,v_proj", lora_rank=3, lora_alpha=5.0),
    ModelArgs(lora_target="all-linear", lora_rank=4, lora_alpha=6.0, use_rslora=True),
]


def start_from(adapter: Path, args: ModelArgs) -> ModelArgs:
    return args.model_copy(update={"adapter_name_or_path": str(adapter)})


def logprobs_of(policy: PackedPolicy) -> Tensor:
    (x,) = inputs()
    with torch.no_grad():
        return policy(x).logprobs


def inputs() -> list[PackedInput]:
    batch = pack(GROUPS)
    (micro,) = microbatches(batch, range(batch.num_sequences), 10_000)
    return [PackedInput.of(micro.tokens, micro.cu_seqlens, micro.positions)]


@pytest.mark.parametrize("args", SCALES, ids=["alpha/rank", "rslora"])
def test_the_policy_starts_as_peft_computes_the_adapter(folder: Path, tmp_path: Path, args: ModelArgs) -> None:
    from peft import PeftModel

    adapter = write_adapter(folder, tmp_path / "adapter", args)
    policy = load_policy(folder, start_from(adapter, args), seed=1)
    plain = load_policy(folder, ModelArgs(), seed=1)
    start = logprobs_of(plain)
    plain.model = PeftModel.from_pretrained(plain.model, str(adapter)).merge_and_unload()
    torch.testing.assert_close(logprobs_of(policy), logprobs_of(plain), rtol=0, atol=1e-5)
    assert not torch.allclose(logprobs_of(policy), start, atol=1e-2)


@pytest.mark.parametrize("args", SCALES, ids=["alpha/rank", "rslora"])
def test_the_reference_keeps_the_adapter_that_training_changes(folder: Path, tmp_path: Path, args: ModelArgs) -> None:
    args = start_from(write_adapter(folder, tmp_path / "adapter", args), args)
    start = logprobs_of(load_policy(folder, args, seed=1))
    policy, engine = trained(folder, args)
    reference = FirstPolicyReference(engine, policy)
    assert torch.equal(reference.infer(inputs())[0], start)
    assert not torch.allclose(logprobs_of(policy), start, atol=1e-3)
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    assert {name for name in frozen if ".lora_" in name} == {
        name.replace(".default.", ".initial.") for name in set(dict(policy.named_parameters())) - frozen
    }


def test_the_frozen_copy_is_not_exported(folder: Path, tmp_path: Path) -> None:
    args = SCALES[1]
    adapter = write_adapter(folder, tmp_path / "adapter", args)
    fresh, started = (load_policy(folder, each, seed=1) for each in (args, start_from(adapter, args)))
    for read in (merged_weights, lambda policy: unmerged_weights(policy, "model.")):
        assert [weight.name for weight in read(started)] == [weight.name for weight in read(fresh)]
    apart = {weight.name: weight.tensor() for weight in unmerged_weights(started, "model.")}
    saved = load_file(adapter / "adapter_model.safetensors")
    assert len(saved) == 4 * 7
    assert all(torch.equal(tensor, apart[name]) for name, tensor in saved.items())


def test_an_exported_adapter_is_read_again_with_its_scale(folder: Path, tmp_path: Path) -> None:
    first = write_adapter(folder, tmp_path / "first", SCALES[1])
    policy, _ = trained(folder, start_from(first, SCALES[1]))
    factors = {w.name: w.tensor().clone() for w in unmerged_weights(policy, "model.") if ".lora_" in w.name}
    save_adapter(tmp_path / "second", factors, SCALES[1], folder)
    assert json.loads((tmp_path / "second" / "adapter_config.json").read_text())["use_rslora"] is True
    again = load_policy(folder, start_from(tmp_path / "second", SCALES[1]), seed=1)
    torch.testing.assert_close(logprobs_of(again), logprobs_of(policy), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 5}, "lora_rank 5 contradicts the adapter in .*, of 3"),
        ({"use_rslora": True}, "use_rslora true contradicts"),
        ({"lora_target": "q_proj"}, r"is of .*v_proj \(2 in all\), which the run does not adapt"),
        ({"lora_target": "q_proj,v_proj,o_proj"}, r"names .*o_proj \(2 in all\), which the adapter .* has not"),
    ],
)
def test_an_adapter_that_the_run_contradicts_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    args = start_from(write_adapter(folder, tmp_path / "adapter", SCALES[0]), SCALES[0])
    with pytest.raises(ValueError, match=message):
        load_policy(folder, args.model_copy(update=changes), seed=1)


def test_an_adapter_of_some_layers_starts_a_run_that_names_them(folder: Path, tmp_path: Path) -> None:
    paths = "layers.1.self_attn.q_proj,layers.1.self_attn.v_proj"
    args = SCALES[0].model_copy(update={"lora_target": paths})
    adapter = write_adapter(folder, tmp_path / "adapter", args)
    with pytest.raises(ValueError, match=r"names .*layers\.0.*q_proj \(2 in all\), which the adapter .* has not"):
        load_policy(folder, start_from(adapter, SCALES[0]), seed=1)
    adapted = {name for name, _ in load_policy(folder, start_from(adapter, args), seed=1).named_parameters()}
    assert {name.partition(".layers.")[2][0] for name in adapted if ".lora_" in name} == {"1"}


def test_an_adapter_of_another_models_size_is_refused(folder: Path, tmp_path: Path) -> None:
    adapter = write_adapter(folder, tmp_path / "adapter", SCALES[0])
    wide = {
        name: torch.zeros(3, 7) if ".lora_A." in name else tensor
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    }
    save_file(wide, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"q_proj with \(7, .* it was trained on another model"):
        load_policy(folder, start_from(adapter, SCALES[0]), seed=1)


def test_a_plain_engine_trains_and_exports_from_the_adapter(folder: Path, tmp_path: Path) -> None:
    args = start_from(write_adapter(folder, tmp_path / "adapter", SCALES[0]), SCALES[0])
    policy = load_policy(folder, args, seed=1)
    first = dict(PlainEngine(policy).tensors())
    again = load_policy(folder, ModelArgs(), seed=1)
    again.model.load_state_dict({name: tensor.clone() for name, tensor in first.items()}, strict=False)
    torch.testing.assert_close(logprobs_of(again), logprobs_of(policy), rtol=0, atol=1e-5)

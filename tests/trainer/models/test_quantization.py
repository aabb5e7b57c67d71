"""4-bit weights under adapters: what is computed, published and kept."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.initial_adapter import with_initial_adapters
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.lora import adapted_layers, linear_paths, save_adapter, unmerged_weights
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.models.quantization import QuantizedLinear, quantized_layers
from tests.families import pack, write_family
from tests.trainer.models.test_lora import logprobs_of, trained

ADAPTED = ModelArgs(lora_target="all-linear", lora_rank=4)
FOUR_BITS = ADAPTED.model_copy(update={"load_in_4bit": True})


def base_of(policy: PackedPolicy) -> dict[str, Tensor]:
    """Return the weights below the adapters."""
    weights = unmerged_weights(policy, "model.")
    return {
        weight.name.removeprefix("model."): weight.tensor().clone() for weight in weights if "lora_" not in weight.name
    }


def dequantized_twin(policy: PackedPolicy, folder: Path, args: ModelArgs) -> PackedPolicy:
    """Return an unquantized policy with the values of a quantized one's base, and new adapters of the same seed."""
    twin, base = load_policy(folder, args.model_copy(update={"load_in_4bit": False}), seed=1), base_of(policy)
    assert base.keys() == base_of(twin).keys()
    with torch.no_grad():
        for name, parameter in twin.model.named_parameters():
            if "lora_" not in name:
                parameter.copy_(base[name.replace(".base_layer.", ".")])
    return twin


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_quantized_policy_is_an_unquantized_one_of_other_weights(
    folder: Path, dtype: str, kind: str, *, nested: bool
) -> None:
    """Logprobs and gradients are equal to the bit: nothing but the values of the base differs."""
    settings = {"dtype": dtype, "bnb_4bit_quant_type": kind, "use_bnb_nested_quant": nested}
    args = FOUR_BITS.model_copy(update=settings)
    policy = load_policy(folder, args, seed=1)
    twin = dequantized_twin(policy, folder, args)
    assert torch.equal(logprobs_of(policy), logprobs_of(twin))
    assert not torch.allclose(logprobs_of(policy), logprobs_of(load_policy(folder, ADAPTED, seed=1)), atol=1e-2)
    x = pack([torch.tensor([5, 3, 6, 4, 5]), torch.tensor([4, 6, 3])])
    for model in (policy, twin):
        model(x).logprobs.sum().backward()
    grads = [{name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in (policy, twin)]
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def gradients(model: PackedPolicy) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        logprobs = model(pack([torch.tensor([5, 3, 6, 4, 5]), torch.tensor([4, 6, 3])])).logprobs
    logprobs.sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_under_autocast_are_those_of_the_same_values(folder: Path) -> None:
    """As with DeepSpeed's torch_autocast."""
    policy = load_policy(folder, FOUR_BITS, seed=1)
    grads, expected = gradients(policy), gradients(dequantized_twin(policy, folder, FOUR_BITS))
    assert grads.keys() == expected.keys()
    assert any(grad.any() for grad in grads.values())
    assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "granitemoehybrid", "gemma2", "deepseek_v3"])
def test_families_compute_with_the_values_of_their_4_bits(tmp_path: Path, family: str) -> None:
    write_family(tmp_path, family)
    policy = load_policy(tmp_path, FOUR_BITS, seed=1)
    twin = dequantized_twin(policy, tmp_path, FOUR_BITS)
    x = pack([torch.tensor([5, 3, 6, 4, 5]), torch.tensor([4, 6, 3])])
    with torch.no_grad():
        assert torch.equal(policy(x).logprobs, twin(x).logprobs)
    assert any(True for _ in quantized_layers(policy))


def test_published_weights_are_those_that_the_trained_policy_computes_with(folder: Path) -> None:
    policy, engine = trained(folder, FOUR_BITS)
    received = load_policy(folder, ModelArgs(), seed=9)
    received.model.load_state_dict(dict(engine.tensors()), strict=False)
    ratio = logprobs_of(policy) - logprobs_of(received)
    kl = (ratio.exp() - 1 - ratio).mean()
    assert float(kl) < 1e-10
    unquantized = load_policy(folder, ModelArgs(), seed=1)
    received.model.load_state_dict({name: each.clone() for name, each in unquantized.model.state_dict().items()})
    assert not torch.allclose(logprobs_of(policy), logprobs_of(received), atol=1e-2)


def test_an_engine_with_base_and_adapter_computes_what_the_learner_does(folder: Path) -> None:
    policy, engine = trained(folder, FOUR_BITS)
    twin, parts = load_policy(folder, ADAPTED, seed=9), dict(engine.tensors("parts"))
    assert dict(engine.tensors("adapter")).keys() == {name for name in parts if "lora_" in name}
    with torch.no_grad():
        for name, parameter in twin.model.named_parameters():
            own = f"base_model.model.{name.replace('.default.', '.')}" if "lora_" in name else name
            parameter.copy_(parts[own.replace(".base_layer.", ".")])
    assert torch.equal(logprobs_of(twin), logprobs_of(policy))


def test_the_reference_is_the_quantized_base(folder: Path) -> None:
    start = logprobs_of(load_policy(folder, FOUR_BITS, seed=1))
    policy, _ = trained(folder, FOUR_BITS)
    with with_initial_adapters(policy):
        assert torch.equal(logprobs_of(policy), start)
    assert not torch.allclose(logprobs_of(policy), start, atol=1e-3)


def test_only_adapters_are_trained(folder: Path) -> None:
    policy, _ = trained(folder, FOUR_BITS)
    before, after = load_policy(folder, FOUR_BITS, seed=1).state_dict(), policy.state_dict()
    assert {name for name, each in after.items() if not torch.equal(each, before[name])} == {
        name for name in before if ".lora_" in name
    }


@pytest.mark.parametrize("nested", [False, True])
def test_transformers_quantizes_the_same_layers_to_the_same_values(tmp_path: Path, *, nested: bool) -> None:
    """As a user loads the base of an exported adapter."""
    write_family(tmp_path, "llama", tie_word_embeddings=False)
    load_policy(tmp_path, ModelArgs(), seed=1).model.save_pretrained(tmp_path)
    ours = load_policy(tmp_path, FOUR_BITS.model_copy(update={"use_bnb_nested_quant": nested}), seed=1)
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings, dtype=torch.float32)
    packed = {
        name.removesuffix(".weight"): each for name, each in theirs.named_parameters() if each.dtype == torch.uint8
    }
    layers = {name: each.base_layer for name, each in adapted_layers(ours.model).items()}
    assert packed.keys() == layers.keys()
    assert all(torch.equal(each.packed.flatten(), packed[name].flatten()) for name, each in layers.items())
    ours.model.set_attn_implementation("eager")
    tokens = torch.arange(3, 40)[None]
    logits = [
        model.train()(tokens).logits for model in (ours.model, theirs)
    ]  # others it computes in bfloat16 on some CPUs
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)


def test_all_linear_layers_but_the_head_are_quantized_whatever_is_adapted(folder: Path) -> None:
    args = ModelArgs(lora_target="q_proj", load_in_4bit=True)
    policy = load_policy(folder, args, seed=1)
    assert sum(1 for _ in quantized_layers(policy)) == 2 * 7
    assert len(adapted_layers(policy)) == 2
    assert {type(each) for name, each in policy.named_modules() if name.endswith(("lm_head", "embed_tokens"))} == {
        nn.Linear,
        nn.Embedding,
    }


def test_an_adapted_head_stays_whole(tmp_path: Path) -> None:
    """As transformers keeps it, with which users load the base of an exported adapter."""
    write_family(tmp_path, "llama", tie_word_embeddings=False)
    args = ModelArgs(lora_target="q_proj,lm_head", load_in_4bit=True)
    policy = load_policy(tmp_path, args, seed=1)
    head = adapted_layers(policy.model)["lm_head"]
    assert type(head.base_layer) is nn.Linear
    names = {name.rpartition(".")[2] for name, each in policy.named_modules() if isinstance(each, QuantizedLinear)}
    assert names == {"base_layer", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    twin = dequantized_twin(policy, tmp_path, args)
    assert torch.equal(logprobs_of(policy), logprobs_of(twin))


def test_subclasses_of_linear_layers_are_neither_adapted_nor_quantized() -> None:
    """Their own forward passes would be lost."""

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    assert list(linear_paths(nn.ModuleDict({"plain": nn.Linear(2, 2), "doubled": Doubled(2, 2)}))) == ["plain"]


def test_a_quantized_layer_keeps_half_a_byte_per_weight_and_its_scales(folder: Path) -> None:
    sizes = {False: 0.5 + 4 / 64, True: 0.5 + 1 / 64 + 4 / 64 / 256}
    for nested, expected in sizes.items():
        policy = load_policy(folder, FOUR_BITS.model_copy(update={"use_bnb_nested_quant": nested}), seed=1)
        for layer in quantized_layers(policy):
            held = sum(buffer.nbytes for buffer in layer.buffers())
            assert held / layer.weight.numel() == pytest.approx(expected, rel=0.05)


def test_conversion_to_16_bits_keeps_the_values_of_quantized_weights(folder: Path) -> None:
    """As DeepSpeed converts a module, buffers included."""
    layer = next(quantized_layers(load_policy(folder, FOUR_BITS, seed=1)))
    before = layer.weight
    assert torch.equal(layer.bfloat16().weight, before)


def test_dequantized_weights_are_not_kept_for_the_gradient(folder: Path) -> None:
    policy = load_policy(folder, FOUR_BITS, seed=1)
    shapes = {layer.weight.shape for layer in quantized_layers(policy)}
    kept = list[tuple[int, ...]]()

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy(pack([torch.tensor([5, 3, 6, 4, 5])]))
    assert kept
    assert not {*kept} & {*shapes, *(shape[::-1] for shape in shapes)}


def test_gradient_checkpointing_gives_the_same_gradients(folder: Path) -> None:
    x, grads = pack([torch.tensor([5, 3, 6, 4, 5])]), []
    for is_kept in (True, False):
        policy = load_policy(folder, FOUR_BITS.model_copy(update={"disable_gradient_checkpointing": is_kept}), seed=1)
        policy.train()
        policy(x).logprobs.sum().backward()
        grads.append([p.grad for p in policy.parameters() if p.grad is not None])
    assert len(grads[0]) > 0
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))


def test_an_adapter_on_a_quantized_base_starts_a_run(folder: Path, tmp_path: Path) -> None:
    """The policy goes on where it ended, which is then the reference."""
    policy, engine = trained(folder, FOUR_BITS)
    save_adapter(tmp_path / "adapter", dict(engine.tensors("adapter")), FOUR_BITS, folder)
    args = FOUR_BITS.model_copy(update={"adapter_name_or_path": str(tmp_path / "adapter")})
    again = load_policy(folder, args, seed=1)
    assert torch.equal(logprobs_of(again), logprobs_of(policy))
    with with_initial_adapters(again):
        assert torch.equal(logprobs_of(again), logprobs_of(policy))

"""The DeepSpeed engine on a CPU: ZeRO stages, ranks and micro-batches must not change what is learned."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue
from safetensors.torch import load_file
from torch import Tensor

from offbeat.trainer.config.actor_train import ModelArgs, StrategyArgs, TrainingArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.engines.base import Hyperparameters, StepOutcome
from offbeat.trainer.engines.deepspeed import STAGE_FILE, DeepSpeedEngine, _deepspeed, merge_settings, min_loss_scale
from offbeat.trainer.engines.group_layout import LAYOUT_FILE
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.models.policy import PackedCritic
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.families import write_family, write_multimodal
from tests.integration.learner_rank import SMOOTH, fixed_batch
from tests.integration.rank_processes import run_ranks
from tests.trainer.engines.comparing import (
    assert_offloading_changes_nothing,
    assert_overflow_is_skipped,
    assert_same,
    assert_scale_ends_at_one,
    assert_steps_agree,
    decaying_groups,
    nll,
    weights_of,
)

LORA = ("0-lora", "3-lora", "fsdp2-lora")
NAMES = ("0", "2", "3", "fsdp2", "0-head", "1-head", "2-head", "3-head", "fsdp2-head", *LORA)
HYPER = Hyperparameters(learning_rate=1e-2, weight_decay=0.1)
needs_float16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="DeepSpeed needs a CPU with float16 instructions"
)
EngineFactory = Callable[..., DeepSpeedEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_tiny_policy(path, TinyPolicyConfig(num_hidden_layers=2), ["a", "b", "c", "d"])
    return path


@pytest.fixture
def engine(folder: Path, ranks: Ranks) -> EngineFactory:
    def build(
        stage: int = 0, dtype: str = "float32", training: TrainingArgs = SMOOTH, **settings: JsonValue
    ) -> DeepSpeedEngine:
        args = ModelArgs.model_validate({"dtype": dtype})
        strategy = StrategyArgs.model_validate({"zero_stage": stage, "strategy_config": settings})
        return DeepSpeedEngine(load_policy(folder, args, seed=1), training, strategy, ranks)

    return build


@pytest.mark.parametrize(("write", "family"), [(write_family, "qwen3_5_text"), (write_multimodal, "qwen3_5")])
def test_recurrent_layers_learn_the_same_on_ranks_with_other_lengths(
    write: Callable[[Path, str], None], family: str, tmp_path: Path
) -> None:
    """Ranks pad their sequences to unequally many lengths at a time; the encoder of images is frozen."""
    write(tmp_path / "model", family)
    names = [f"{engine}-{variant}" for engine in ("0", "3", "fsdp2") for variant in ("ragged", "lora-ragged")]
    names += ["tp-ragged", "pp-ragged"] if family == "qwen3_5_text" else []
    for world in (1, 2):
        run_ranks("learner_rank.py", world, tmp_path / "model", tmp_path, *names, timeout_s=240)
    for name in names:
        expected = load_file(tmp_path / f"0-{name.partition('-')[2]}-of-1.safetensors")
        for world in (1, 2):
            assert_same(expected, load_file(tmp_path / f"{name}-of-{world}.safetensors"), atol=2e-5)


def test_zero_stages_fsdp2_and_ranks_learn_the_same(folder: Path, tmp_path: Path) -> None:
    """Three micro-batches on two ranks: one rank has a pass less of its own."""
    for world in (1, 2):
        run_ranks("learner_rank.py", world, folder, tmp_path, *NAMES, timeout_s=240)
    with torch.no_grad():
        plain = load_policy(folder, ModelArgs(), seed=1)
        alone = torch.cat([plain(x).logprobs for x in fixed_batch()])
    for name in ("hf_infer", "deepspeed_infer"):
        for who in ("0-of-1", "0-of-2", "1-of-2"):
            said = load_file(tmp_path / f"{name}-{who}.safetensors")["logprobs"]
            torch.testing.assert_close(said, alone, rtol=0, atol=1e-5, msg=lambda m, n=f"{name}-{who}": f"{n}: {m}")
    expected = load_file(tmp_path / "0-of-1.safetensors")
    assert "model.embed_tokens.weight" in expected
    for name in ("0", "2", "3", "fsdp2"):
        for world in (1, 2):
            assert_same(expected, load_file(tmp_path / f"{name}-of-{world}.safetensors"), atol=2e-5)
    expected = load_file(tmp_path / "0-lora-of-1.safetensors")
    for name in LORA:
        for world in (1, 2):
            assert_same(expected, load_file(tmp_path / f"{name}-of-{world}.safetensors"), atol=2e-5)
    for name in ("3-lora", "fsdp2-lora"):
        counts = load_file(tmp_path / f"{name}-gathered-of-2.safetensors")
        (adapter, in_adapter), (parts, in_parts) = (counts[form].tolist() for form in ("adapter", "parts"))
        assert in_adapter <= adapter < 1.1 * in_adapter, f"{name}: adapters are gathered, without their base"
        assert parts > 0.9 * in_parts > 2 * in_adapter, "FSDP2 keeps parameters outside of layers whole after a pass"
    expected = load_file(tmp_path / "0-head-of-1.safetensors")
    assert not [name for name in expected if "value_head" in name]  # never published
    assert expected["said"][1].abs().min() > 0.01
    for name in (each for each in NAMES if each.endswith("-head")):
        for world in (1, 2):
            assert_same(expected, load_file(tmp_path / f"{name}-of-{world}.safetensors"), atol=5e-5)
    saved = load_file(tmp_path / "fsdp2-of-1.safetensors")
    del saved["logprobs"]
    assert_same(load_file(tmp_path / "resumed.safetensors"), saved)


@needs_float16
def test_ranks_agree_on_the_loss_scale(folder: Path, tmp_path: Path) -> None:
    """A gradient that overflows on one rank alone is skipped by both."""
    names = ("fsdp2-half", "1-half")
    for world in (1, 2):
        run_ranks("learner_rank.py", world, folder, tmp_path, *names, timeout_s=240)
    for name in names:
        alone, first, second = (
            load_file(tmp_path / f"{name}-{who}.safetensors") for who in ("0-of-1", "0-of-2", "1-of-2")
        )
        assert_same(first, second)
        before, after, applied = first.pop("scales").tolist()
        assert not applied
        assert after <= before
        del alone["scales"]
        assert_same(alone, first, atol=4e-3)


def test_the_cut_into_micro_batches_does_not_change_the_step(engine: EngineFactory) -> None:
    one, two = engine(), engine()
    outcomes = [one.train(fixed_batch(1), nll, HYPER), two.train(fixed_batch(6), nll, HYPER)]
    assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, rel=1e-5)
    assert_same(weights_of(one), weights_of(two), atol=1e-5)


def test_a_step_is_torch_adamw_on_the_clipped_gradient(engine: EngineFactory, folder: Path) -> None:
    ours = engine(training=SMOOTH.model_copy(update={"max_grad_norm": 0.5}))
    twin = load_policy(folder, ModelArgs(), seed=1)
    optimizer = torch.optim.AdamW(decaying_groups(twin, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    for _ in range(3):
        outcome = ours.train(fixed_batch(), nll, HYPER)
        optimizer.zero_grad()
        sum(nll(0, twin(x)) for x in fixed_batch()).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
    expected = {name.removeprefix("model."): p.detach() for name, p in twin.named_parameters()}
    assert_same(weights_of(ours), expected, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 2])
def test_each_key_of_the_optimizer_changes_what_is_learned(engine: EngineFactory, stage: int) -> None:
    def learned(decay: float = 0.1, **changes: float) -> Tensor:
        ours = engine(stage, training=SMOOTH.model_copy(update=changes))
        for _ in range(2):
            ours.train(fixed_batch(), nll, Hyperparameters(learning_rate=1e-2, weight_decay=decay))
        return torch.cat([weight.flatten() for weight in weights_of(ours).values()])

    plain = learned()
    assert torch.equal(plain, learned())
    changes = (
        {"adam_beta1": 0.5},
        {"adam_beta2": 0.5},
        {"adam_epsilon": 1e-2},
        {"max_grad_norm": 0.05},
        {"decay": 0.0},
        {"decay_all_weights": True},
    )
    for change in changes:
        assert (learned(**change) - plain).abs().max() > 1e-5, change


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "float32"), (3, "float32"), (0, "bfloat16")])
def test_a_loss_that_is_not_finite_changes_nothing(engine: EngineFactory, stage: int, dtype: str) -> None:
    policy, undisturbed = engine(stage, dtype), engine(stage, dtype)
    for each in (policy, undisturbed):
        each.train(fixed_batch(), nll, HYPER)
    before = weights_of(policy)
    outcome = policy.train(fixed_batch(), lambda i, said: nll(i, said) * (math.nan if i == 1 else 1.0), HYPER)
    assert not outcome.applied
    assert_same(weights_of(policy), before)
    for each in (policy, undisturbed):
        assert each.train(fixed_batch(), nll, HYPER).applied
    assert_same(weights_of(policy), weights_of(undisturbed))


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (1, "float32"), (2, "bfloat16"), (3, "float32")])
def test_a_loaded_engine_continues_exactly(engine: EngineFactory, stage: int, dtype: str, tmp_path: Path) -> None:
    saved = engine(stage, dtype)
    saved.train(fixed_batch(), nll, HYPER)
    saved.save(tmp_path)
    saved.train(fixed_batch(), nll, HYPER)
    fresh = engine(stage, dtype)
    fresh.load(tmp_path)
    fresh.train(fixed_batch(), nll, HYPER)
    assert_same(weights_of(saved), weights_of(fresh))


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16")])
def test_offloaded_states_come_back_as_they_were(engine: EngineFactory, stage: int, dtype: str) -> None:
    assert_offloading_changes_nothing(engine(stage, dtype), engine(stage, dtype))


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16")])
def test_a_loaded_engine_continues_with_the_settings_that_it_has_now(
    engine: EngineFactory, stage: int, dtype: str, tmp_path: Path
) -> None:
    saved = engine(stage, dtype)
    saved.train(fixed_batch(), nll, HYPER)
    saved.save(tmp_path)
    saved.train(fixed_batch(), nll, HYPER)
    name = "model.layers.0.mlp.up_proj.weight"
    for given in ({"adam_beta1": 0.5}, {"adam_beta2": 0.5}, {"adam_epsilon": 0.1}, {"max_grad_norm": 1e-4}):
        fresh = engine(stage, dtype, SMOOTH.model_copy(update=given))
        fresh.load(tmp_path)
        fresh.train(fixed_batch(), nll, HYPER)
        assert not torch.equal(weights_of(fresh)[name], weights_of(saved)[name]), given


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_in_the_hosts_memory_learns_the_same(engine: EngineFactory, stage: int, tmp_path: Path) -> None:
    offload: dict[str, JsonValue] = {"offload_optimizer": {"device": "cpu"}}
    resident, moved, resumed = engine(stage), *(engine(stage, zero_optimization=offload) for _ in range(2))
    for each in (resident, moved):
        each.train(fixed_batch(), nll, HYPER)
    moved.save(tmp_path)
    resumed.load(tmp_path)
    for each in (resident, moved, resumed):
        each.train(fixed_batch(), nll, HYPER)
    assert_same(weights_of(moved), weights_of(resident), atol=1e-6)
    assert_same(weights_of(resumed), weights_of(moved))


def test_ranks_on_cpus_keep_deepspeed_from_the_hosts_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _deepspeed.__wrapped__("cpu")
    assert os.environ["DS_ACCELERATOR"] == "cpu"


def test_a_configuration_that_deepspeed_refuses_is_an_error_of_the_configuration(engine: EngineFactory) -> None:
    offload: JsonValue = {"offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ValueError, match="DeepSpeed refuses strategy_config: You are using ZeRO-Offload"):
        engine(1, zero_optimization=offload, zero_force_ds_cpu_optimizer=True)


@pytest.mark.parametrize(("written", "read"), [(0, 2), (2, 0), (2, 3), (3, 0)])
def test_a_state_of_another_zero_stage_is_refused_naming_the_key(
    engine: EngineFactory, written: int, read: int, tmp_path: Path
) -> None:
    engine(written).save(tmp_path)
    with pytest.raises(RuntimeError, match=f"zero_stage={written}"):
        engine(read).load(tmp_path)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_state_with_other_exemptions_from_decay_is_refused_naming_the_key(
    engine: EngineFactory, stage: int, tmp_path: Path
) -> None:
    together = SMOOTH.model_copy(update={"decay_all_weights": True})
    engine(stage).save(tmp_path / "apart")
    engine(stage, training=together).save(tmp_path / "together")
    with pytest.raises(RuntimeError, match="decay_all_weights=false"):
        engine(stage, training=together).load(tmp_path / "apart")
    with pytest.raises(RuntimeError, match="decay_all_weights=true"):
        engine(stage).load(tmp_path / "together")
    (tmp_path / "together" / LAYOUT_FILE).unlink()  # as version 0.1 did
    engine(stage, training=together).load(tmp_path / "together")
    engine(stage, training=SMOOTH.model_copy(update={"weight_decay": 0.0})).load(tmp_path / "together")


def test_bfloat16_weights_gather_steps_too_small_for_them(engine: EngineFactory) -> None:
    policy = engine(dtype="bfloat16")
    before = weights_of(policy)
    for _ in range(40):
        policy.train(fixed_batch(), nll, Hyperparameters(1e-5, 0.0))
    norm = "model.norm.weight"
    assert before[norm].dtype == torch.bfloat16
    assert not torch.equal(
        before["model.layers.0.self_attn.q_proj.weight"], weights_of(policy)["model.layers.0.self_attn.q_proj.weight"]
    )
    assert float((weights_of(policy)[norm] - before[norm]).abs().max()) < 1e-2


@needs_float16
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_float16_skips_overflows_and_resumes_with_its_scale(engine: EngineFactory, stage: int, tmp_path: Path) -> None:
    assert_overflow_is_skipped(lambda: engine(stage, "float16"), tmp_path)


@needs_float16
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_float16_steps_are_those_of_float32_but_for_rounding(engine: EngineFactory, stage: int) -> None:
    assert_steps_agree(engine(stage, "float16"), engine(stage))


@needs_float16
@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_is_never_finite_ends_at_the_smallest_scale(engine: EngineFactory, stage: int) -> None:
    assert_scale_ends_at_one(engine(stage, "float16"))


@needs_float16
def test_deepspeeds_own_settings_of_the_scale_hold(folder: Path, ranks: Ranks) -> None:
    strategy = StrategyArgs.model_validate({"strategy_config": {"fp16": {"initial_scale_power": 8}}})
    policy = DeepSpeedEngine(load_policy(folder, ModelArgs(dtype="float16"), seed=1), SMOOTH, strategy, ranks)
    assert policy.train(fixed_batch(), nll, HYPER).loss_scale == 2**8


def test_a_scale_that_does_not_fall_is_no_overflow_to_wait_for() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    static, bounded = LossScaler(1024.0), DynamicLossScaler(256.0, 1000, 64.0, 1, False, False)
    for scaler, ends_at in ((static, 1024.0), (bounded, 64.0)):
        outcomes: list[StepOutcome] = []
        for _ in range(4):
            outcomes.append(StepOutcome(False, math.nan, scaler.loss_scale, min_loss_scale(scaler)))
            scaler.update_scale(True)
        assert (outcomes[-1].loss_scale, outcomes[-1].overflowed) == (ends_at, False)
        assert outcomes[0].overflowed == (scaler is bounded)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_many_micro_batches_are_summed_in_float32(engine: EngineFactory, stage: int) -> None:
    """512 equal parts: a sum in bfloat16 (8 bits) stops growing at 256 times a part, half of the whole."""
    parts = 512
    whole = engine(stage, "bfloat16").train(fixed_batch(1), nll, HYPER)
    cut = engine(stage, "bfloat16").train(fixed_batch(1) * parts, lambda _, output: nll(0, output) / parts, HYPER)
    assert cut.grad_norm == pytest.approx(whole.grad_norm, rel=1e-2)


def test_a_state_of_bfloat16_sums_is_refused_naming_the_key(engine: EngineFactory, tmp_path: Path) -> None:
    written = engine(1, "bfloat16")
    written.save(tmp_path)
    (tmp_path / STAGE_FILE).write_text("1")  # as version 0.1 did
    with pytest.raises(RuntimeError, match=r"data_types\.grad_accum_dtype=bf16"):
        engine(1, "bfloat16").load(tmp_path)


def test_a_reset_optimizer_forgets_its_moments(engine: EngineFactory) -> None:
    used, fresh = engine(), engine()
    used.train(fixed_batch(), nll, Hyperparameters(0.0, 0.0))
    used.reset_optimizer()
    for each in (used, fresh):
        each.train(fixed_batch(), nll, HYPER)
    assert_same(weights_of(used), weights_of(fresh))


def test_the_critic_trains_on_the_same_engine(folder: Path, ranks: Ranks) -> None:
    critic = load_critic(folder, ModelArgs(), seed=1)
    assert isinstance(critic, PackedCritic)
    engine = DeepSpeedEngine(critic, TrainingArgs(), StrategyArgs(), ranks)
    batch = fixed_batch()

    def miss(_: int, values: Tensor) -> Tensor:
        return ((values - 1.0) ** 2).sum()

    first = sum(float(miss(0, values)) for values in engine.infer(batch))
    for _ in range(20):
        engine.train(batch, miss, HYPER)
    assert sum(float(miss(0, values)) for values in engine.infer(batch)) < first / 10


def test_settings_of_the_run_override_ours() -> None:
    ours = {"zero_optimization": {"stage": 2, "overlap_comm": False}, "steps_per_print": 5}
    assert merge_settings(ours, {"zero_optimization": {"overlap_comm": True}}) == {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "steps_per_print": 5,
    }

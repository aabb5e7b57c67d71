"""The learner on a GPU: it learns what it learns on a CPU, and the varlen kernel agrees with padding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbeat.trainer.config.actor_train import ModelArgs, StrategyArgs, TrainingArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.engines.deepspeed import DeepSpeedEngine
from offbeat.trainer.engines.fsdp2 import FSDP2Engine
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.attention import packed_attention
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import Packing
from offbeat.trainer.models.policy import Sampled
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.paths import ROOT
from tests.trainer.engines.comparing import assert_overflow_is_skipped, assert_steps_agree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SINGLE = (
    *("0", "1", "2", "3", "fsdp2", "0-checkpointing"),
    *("0-head", "3-head", "fsdp2-head", "0-lora", "3-lora", "fsdp2-lora"),
)
"""Engines in float32, by their names in `learner_rank.py`."""
HALF = ("1-bf16", "2-bf16", "3-bf16", "fsdp2-bf16")


@pytest.mark.timeout(600)
def test_a_gpu_learns_what_a_cpu_learns(tmp_path: Path) -> None:
    model, environment = tmp_path / "model", {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    model.mkdir()
    write_tiny_policy(model, TinyPolicyConfig(num_hidden_layers=2), list("abcdefg"))
    script = str(ROOT / "tests/integration/learner_rank.py")
    devices = {"cpu": {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}, "cuda": {"LEARNER_DEVICE": "cuda"}}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for device, variables in devices.items():
            (tmp_path / device).mkdir()
            command = [sys.executable, script, str(model), str(tmp_path / device), *SINGLE, *HALF]
            running.append(subprocess.Popen(command, env=environment | variables))
        assert [process.wait(timeout=500) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    failures: list[str] = []
    for name in ("hf_infer-0", "deepspeed_infer-0", *SINGLE, *HALF):
        atol = 8e-3 if name in HALF else 1e-4  # a weight of 1 has steps of 2**-7 in bfloat16
        said, expected = (load_file(tmp_path / device / f"{name}-of-1.safetensors") for device in ("cuda", "cpu"))
        assert said.keys() == expected.keys()
        for key, tensor in expected.items():
            # the logprobs of two steps in bfloat16 differ by what its forward pass rounds
            limit = 5e-2 if name in HALF and key == "logprobs" else atol
            difference = (said[key].float() - tensor.float()).abs().max().item()
            if not difference <= limit:
                failures.append(f"{name} {key}: {difference:.3g} > {limit:g}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(("kv_heads", "window"), [(4, None), (2, None), (4, 8)])
def test_the_varlen_kernel_agrees_with_padding(kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    packing = Packing.of(torch.tensor([0, 7, 8, 40, 90], device="cuda"))
    query = torch.randn(1, 4, 90, 64, device="cuda")
    key, value = (torch.randn(1, kv_heads, 90, 64, device="cuda") for _ in range(2))
    grads: list[list[torch.Tensor]] = []
    outputs: list[torch.Tensor] = []
    for kind in (torch.float32, torch.bfloat16):
        leaves = [states.to(kind, copy=True).requires_grad_() for states in (query, key, value)]
        out, _ = packed_attention(
            torch.nn.Module(), *leaves, None, packing=packing, scaling=0.125, sliding_window=window
        )
        out.float().square().sum().backward()
        outputs.append(out.float())
        grads.append([leaf.grad.float() for leaf in leaves if leaf.grad is not None])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=3e-2)
    for plain, varlen in zip(*grads, strict=True):
        torch.testing.assert_close(plain, varlen, rtol=5e-2, atol=1e-1)


@pytest.mark.parametrize("strategy", [{"zero_stage": 0}, {"zero_stage": 3}, {"strategy_name": "fsdp2_train"}])
def test_float16_trains_with_a_loss_scale(strategy: dict[str, object], tmp_path: Path) -> None:
    folder, state = tmp_path / "policy", tmp_path / "state"
    folder.mkdir()
    state.mkdir()
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=2), ["a", "b", "c", "d"])
    # from a file, as random weights depend on the type that they are drawn in
    load_policy(folder, ModelArgs(), seed=1).model.save_pretrained(folder)
    args = StrategyArgs.model_validate(strategy)

    def build(ranks: Ranks, dtype: str) -> TrainEngine[Sampled]:
        policy = load_policy(folder, ModelArgs.model_validate({"dtype": dtype}), seed=1)
        if args.strategy_name == "fsdp2_train":
            return FSDP2Engine(policy, TrainingArgs(), ranks)
        return DeepSpeedEngine(policy, TrainingArgs(), args, ranks)

    with process_group(ranks_of_environment("cuda")) as ranks:
        assert_steps_agree(build(ranks, "float16"), build(ranks, "float32"))
        assert_overflow_is_skipped(lambda: build(ranks, "float16"), state)

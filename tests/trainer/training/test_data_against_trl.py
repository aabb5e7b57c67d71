"""The same rows and model through TRL's DPOTrainer and SFTTrainer and ours: tokens, losses and gradients agree."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.benchmarks.harness.pretrained import write_llama
from offbeat.envs.frozen_lake.rows import conversations, pairs, write_rows
from offbeat.services.messages.types import Group
from offbeat.services.rollout.data.config import GROUP_SIZES, DataConfig
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.batch import pack
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.training.data_step import DataTrainer
from offbeat.trainer.training.optimizer_step import StepModels
from tests.trainer.plain_engine import PlainEngine

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: it is part of the dev extra", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
ROWS = 6
TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Both sides mark the same tokens: nothing follows the token that ends a turn."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model, another one as reference, and rows."""
    path = tmp_path_factory.mktemp("against-trl")
    write_llama(path / "model", TAGGED)
    write_llama(path / "reference", TAGGED)
    reference = load_policy(path / "reference", ModelArgs(), seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    reference.model.save_pretrained(path / "reference")
    write_rows(path / "sft.jsonl", conversations(ROWS))
    write_rows(path / "dpo.jsonl", pairs(ROWS))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield path
    torch.set_num_threads(before)


def our_groups(folder: Path, pipeline: str) -> list[Group]:
    data = DataConfig(dataset_name=folder / f"{pipeline}.jsonl", shuffle=False)
    source = DataSource(data, pipeline, folder / "model", seed=0, max_tokens=512)
    size = GROUP_SIZES[pipeline]
    rows = [tuple(source.trajectory(n, index, 0) for index in range(size)) for n in range(ROWS)]
    return [Group(f"{n}-0", str(n), n, pipeline, 0, 0, members) for n, members in enumerate(rows)]


def our_step(
    folder: Path, pipeline: str, settings: dict[str, Any], **model_args: Any
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step, by name."""
    args = {"learning_rate": 0.0, "max_tokens_per_microbatch": 400}
    tree = {"pipeline": pipeline, "data": {"dataset_name": folder / f"{pipeline}.jsonl"}, **settings}
    tree["actor_train"] = {"training_args": args, "model_args": model_args}
    config = LearnerConfig.model_validate(tree)
    policy = load_policy(folder / "model", config.actor_train.model_args, seed=0)
    reference = (
        FrozenModel(load_policy(folder / "reference", ModelArgs(), seed=0), ALONE) if pipeline == "dpo" else None
    )
    engine = PlainEngine(policy)
    groups = tuple(our_groups(folder, pipeline))
    gauges = DataTrainer(config, StepModels(engine, None, reference), ALONE).train(StepBatch(0, groups, groups))
    norm = gauges["actor/grad_norm"].value
    scale = min(1.0, 1.0 / (norm + 1e-6))  # what clipping took
    gradients = {name: p.grad / scale for name, p in policy.model.named_parameters() if p.grad is not None}
    return gauges["loss"].value, gradients


def trl_arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": ROWS,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "train_sampling_strategy": "sequential",
        "max_length": 512,
    }


def trl_step(trainer: Any) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and inputs of the first batch, through the trainer's own dataset, collator and loss."""
    (batch, *_) = trainer.get_train_dataloader()
    trainer.model.train()
    inputs = trainer._prepare_inputs(batch)
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    trainer.model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients, batch


def assert_equal_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    scale = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert scale > 0
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-5 * scale, msg=name)


LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({}, {}),
    "a greater beta": ({"beta": 0.5}, {"beta": 0.5}),
    "hinge": ({"loss_type": "hinge"}, {"loss_type": "hinge"}),
    "ipo": ({"loss_type": "ipo"}, {"loss_type": "ipo"}),
    "robust": (
        {"loss_type": "robust", "label_smoothing": 0.2},
        {"loss_type": "robust", "label_smoothing": 0.2},
    ),
    "apo_zero": ({"loss_type": "apo_zero"}, {"loss_type": "apo_zero"}),
    "apo_down": ({"loss_type": "apo_down"}, {"loss_type": "apo_down"}),
    "length normalization": ({"length_normalization": True}, {"loss_type": "sigmoid_norm"}),
    "an SFT term": ({"sft_coef": 0.7}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}),
}
"""Ours, and TRL's."""


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared prefix"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_dpo_step_equals_trls(name: str, shared: bool, folder: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    ours, theirs = LOSSES[name]
    rows = load_dataset("json", data_files=str(folder / "dpo.jsonl"), split="train", cache_dir=str(folder / "cache"))
    rows = rows.map(lambda row: {key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")})
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32),
        args=DPOConfig(**trl_arguments(folder), **theirs),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    expected, of_trl, batch = trl_step(trainer)
    loss, gradients = our_step(folder, "dpo", {"dpo": ours}, shared_prefix=shared)
    packed = pack(our_groups(folder, "dpo"))
    assert int(batch["completion_mask"].sum()) == packed.num_sampled
    assert int(batch["attention_mask"].sum()) == packed.num_tokens
    assert loss == pytest.approx(expected, rel=1e-5)
    assert_equal_gradients(gradients, of_trl)


def test_an_sft_step_equals_trls(folder: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows = load_dataset("json", data_files=str(folder / "sft.jsonl"), split="train", cache_dir=str(folder / "cache"))
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=SFTConfig(**trl_arguments(folder), assistant_only_loss=True),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    expected, of_trl, batch = trl_step(trainer)
    loss, gradients = our_step(folder, "sft", {})
    packed = pack(our_groups(folder, "sft"))
    assert int((batch["labels"] != -100).sum()) == packed.num_sampled
    assert loss == pytest.approx(expected, rel=1e-5)
    assert_equal_gradients(gradients, of_trl)

"""One of the ranks that divide the tokens of each pass; see `test_ulysses`."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from offbeat.trainer.algorithms.divergences import DivergenceTerms
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.engines.fsdp2 import FSDP2Engine
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.distillation import Distillation, TeacherTokens, TopQuery
from offbeat.trainer.models.divergence import ReferenceStates
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.models.packing import PackedInput
from tests.families import pack
from tests.integration.learner_rank import SMOOTH

SIZE = 4
HYPER = Hyperparameters(1e-2, 0.1, head_learning_rate=1e-1)
LENGTHS = ((90, 7, 23), (1, 2), (31,))
"""Of sequences of each pass: more than a window or chunk, fewer tokens than ranks, and a number that ranks do not divide."""
MODELS = ("mistral", "qwen3", "gemma3_text", "qwen3_moe", "qwen3_5_text", "qwen3_next", "qwen3_5", "gemma3")
LINEAR_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
CHANGES = dict.fromkeys(("qwen3_5_text", "qwen3_next", "qwen3_5"), LINEAR_HEADS)


def ragged() -> list[PackedInput]:
    generator = torch.Generator().manual_seed(0)
    return [
        replace(pack([torch.randint(3, 60, (n,), generator=generator) for n in lengths]), with_next=True)
        for lengths in LENGTHS
    ]


def with_temperatures(x: PackedInput) -> PackedInput:
    return replace(x, temperatures=torch.linspace(0.5, 2.0, len(x.positions)))


def with_reference(x: PackedInput) -> PackedInput:
    generator = torch.Generator().manual_seed(len(x.tokens))
    hidden, head = torch.randn(len(x.positions), 8, generator=generator), torch.randn(64, 8, generator=generator)
    return replace(x, reference=ReferenceStates(hidden, head))


def with_teacher(x: PackedInput) -> PackedInput:
    generator = torch.Generator().manual_seed(len(x.tokens))
    count = len(x.positions)
    logprobs = torch.randn(count, 64, generator=generator).log_softmax(1)
    teacher = TeacherTokens(None, logprobs, torch.linspace(0, 1, count))
    return replace(x, distillation=Distillation("reverse_kl", DivergenceTerms(), 0.7, True, (teacher,)))


def as_tree(_: PackedInput) -> PackedInput:
    """A block that two others continue, as members of a group do their prompt."""
    tokens = torch.arange(3, 33)
    borders, parents = torch.tensor([0, 11, 18, 30]), torch.tensor([-1, 0, 0])
    return replace(PackedInput.of(tokens, borders, torch.arange(11, 30), parents=parents), with_next=True)


INPUTS: dict[str, Callable[[PackedInput], PackedInput]] = {
    "plain": lambda x: x,
    "temperatures": with_temperatures,
    "reference": with_reference,
    "teacher": with_teacher,
    "tree": as_tree,
}


def loss(_: int, said: Any) -> Tensor:
    """Every output has a part, each token another one."""
    parts = [part for part in said if part is not None]
    return torch.stack([(part * torch.linspace(0.5, 1.5, len(part))).sum() for part in parts]).sum() / 100


def rows(said: Any) -> Tensor:
    return torch.stack([part for part in said if part is not None])


def policy_learned(folder: Path, inputs: str, ranks: Ranks, size: int) -> dict[str, Tensor]:
    """Return outputs, the gradient's norm, and the weights after a step."""
    args = ModelArgs(disable_gradient_checkpointing=inputs != "plain")
    engine = FSDP2Engine(load_policy(folder, args, seed=1, value_head=True), SMOOTH, ranks, ulysses_size=size)
    batch = [INPUTS[inputs](x) for x in ragged()]
    engine.train(batch, loss, HYPER)  # from heads of zero
    said = {"said": torch.cat(engine.infer(batch, rows), -1)}
    norm = torch.tensor(engine.train(batch, loss, HYPER).grad_norm)
    top = torch.cat(engine.infer([replace(x, top=TopQuery(3, 1.0, 64), with_next=False) for x in batch]), -1)
    return said | {"norm": norm, "top": top} | {name: tensor.clone() for name, tensor in engine.tensors()}


def critic_learned(folder: Path, ranks: Ranks, size: int) -> dict[str, Tensor]:
    engine = FSDP2Engine(load_critic(folder, ModelArgs(), seed=1), SMOOTH, ranks, ulysses_size=size)
    for _ in range(2):
        engine.train(ragged(), lambda _, values: ((values - 1.0) ** 2).sum() / 100, HYPER)
    return {"values": torch.cat(engine.infer(ragged(), lambda values: values), -1)}


def learned(models: Path, ranks: Ranks, size: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for model in MODELS:
        yield f"{model}-plain", policy_learned(models / model, "plain", ranks, size)
    for inputs in INPUTS:
        yield f"qwen3-{inputs}", policy_learned(models / "qwen3", inputs, ranks, size)
    yield "qwen3-critic", critic_learned(models / "qwen3", ranks, size)


def main(models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(ranks_of_environment("cpu")) as ranks:
        for name, tensors in learned(models, ranks, SIZE):
            if ranks.rank == 0:
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, out / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Tiny judges that learned what to answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from offbeat.services.chat.append_only import load_chat_format
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy


class Lesson(NamedTuple):
    question: str
    answer: str


def write_judge(folder: Path, lessons: Sequence[Lesson], *, max_steps: int = 300) -> None:
    """Write a model that answers each question as taught, greedily."""
    torch.manual_seed(3)
    words = dict.fromkeys(word for lesson in lessons for text in lesson for word in text.split())
    tiny = TinyPolicyConfig(num_hidden_layers=2, max_position_embeddings=2048)
    write_tiny_policy(folder, tiny, list(words))
    chat, model = load_chat_format(folder), load_policy(folder, ModelArgs(), seed=3).model
    rows = [(chat.first_prompt("", question), (*chat.encode(answer), chat.end_id)) for question, answer in lessons]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(max_steps):
        optimizer.zero_grad()
        margins = [_learn(model, torch.tensor(prompt), torch.tensor(answer)) for prompt, answer in rows]
        if min(margins) > 2.0:
            break
        optimizer.step()
    else:
        raise AssertionError(f"the lessons are not learned: {margins}")
    model.save_pretrained(folder)


def _learn(model: torch.nn.Module, prompt: torch.Tensor, answer: torch.Tensor) -> float:
    """Accumulate a lesson's gradient; return the least margin of its tokens over all others, in nats."""
    ids = torch.cat([prompt, answer])
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
    torch.nn.functional.cross_entropy(logits, answer).backward()
    own = logits.gather(1, answer[:, None])
    return float((own - logits.scatter(1, answer[:, None], -torch.inf).max(dim=1, keepdim=True).values).min().detach())

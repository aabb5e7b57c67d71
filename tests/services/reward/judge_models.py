"""Tiny judges that learned what to answer."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.services.chat.append_only import load_chat_format
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.tiny import UNKNOWN, write_tiny_policy

LEARNING_RATE, MARGIN = 3e-3, 2.0


class Lesson(NamedTuple):
    question: str
    answer: str


def write_judge(folder: Path, lessons: Sequence[Lesson], *, max_steps: int = 300) -> None:
    """Write a model that answers each question as taught, greedily; `<unk>` stands for any other word."""
    torch.manual_seed(3)
    words = dict.fromkeys(word for lesson in lessons for text in lesson for word in text.split() if word != UNKNOWN)
    tiny = TinyPolicyConfig(num_hidden_layers=2, max_position_embeddings=2048)
    write_tiny_policy(folder, tiny, list(words))
    chat, policy = load_chat_format(folder), load_policy(folder, ModelArgs(), seed=3)
    rows = [(chat.first_prompt("", question), (*chat.encode(answer), chat.end_id)) for question, answer in lessons]
    batch = pack(rows)
    learned = batch.tokens[batch.positions]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    for _ in range(max_steps):
        logits = policy.logits(batch)
        if float(margins(logits.detach(), learned).min()) > MARGIN:
            break
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, learned).backward()
        optimizer.step()
    else:
        raise AssertionError("the lessons are not learned")
    policy.model.save_pretrained(folder)


def pack(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PackedInput:
    tokens = [token for prompt, answer in rows for token in (*prompt, *answer)]
    cuts = [0, *accumulate(len(prompt) + len(answer) for prompt, answer in rows)]
    positions = [end - n for (_, answer), end in zip(rows, cuts[1:], strict=True) for n in range(len(answer), 0, -1)]
    return PackedInput.of(torch.tensor(tokens), torch.tensor(cuts), torch.tensor(positions))


def margins(logits: Tensor, learned: Tensor) -> Tensor:
    """Return each learned token's logit over the best other one."""
    others = logits.scatter(1, learned[:, None], -torch.inf).amax(1)
    return logits.gather(1, learned[:, None])[:, 0] - others

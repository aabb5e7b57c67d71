"""Teachers' most probable tokens by group, and their encoding in `Group.scores`.

Invariant: as `group_scorer`.
"""

import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.whole_sequences import with_prompts
from offbeat.trainer.engines.frozen import LogprobModel
from offbeat.trainer.models.distillation import TopQuery
from offbeat.trainer.training.group_scorer import EncodedScores, GroupOutputs, GroupScorer

HEADER = struct.Struct("<II")
"""K, 0 for the whole vocabulary, and number of tokens M; ids [M, K] int32 and logprobs [M, K + 1] float32 follow, or
logprobs [M, V].
"""


class TeacherScorer:
    """Scores of one teacher, whose vocabulary may differ in size."""

    def __init__(
        self, model: LogprobModel, config: LearnerConfig, infer_batch_size: int | None, vocab_size: int
    ) -> None:
        """vocab_size: number of the policy's logits."""
        self._scorer = GroupScorer(model, config, infer_batch_size)
        self._with_prompts = config.distill.distill_on_prompt
        self._query = TopQuery(config.distill.logits_topk, config.distill.teacher_temperature, vocab_size)

    def encode(self, groups: Sequence[Group]) -> list[EncodedScores]:
        if self._with_prompts:
            groups = with_prompts(groups)
        return [_encode(outputs) for outputs in self._scorer.infer(groups, self._query)]


def decode_teacher(group: Group, key: str, num_tokens: int) -> tuple[Tensor | None, Tensor]:
    """Return ids and logprobs of a group, as in `TeacherTokens`. num_tokens: expected.

    Raises:
        ValueError: there are none under this key, or of other tokens.
    """
    blob = group.scores.get(key, b"")
    k, count = HEADER.unpack_from(blob) if blob else (0, 0)
    if not blob or count != num_tokens:
        found = f"those of {count}" if blob else "none"
        raise ValueError(f"{group.group_id} needs distributions of {num_tokens} tokens by {key}, and has {found}")
    ids = np.frombuffer(blob, "<i4", count * k, HEADER.size).reshape(count, k).astype(np.int64)
    logprobs = np.frombuffer(blob, "<f4", offset=HEADER.size + 4 * count * k).reshape(count, -1).copy()
    return (torch.from_numpy(ids) if k else None), torch.from_numpy(logprobs)


def _encode(outputs: GroupOutputs) -> EncodedScores:
    batch, micro_batches, parts = outputs
    rows = parts[0].new_empty(batch.num_sampled, len(parts[0]), device="cpu") if parts else torch.zeros(0, 0)
    for micro, part in zip(micro_batches, parts, strict=True):
        rows[micro.index] = part.T.cpu()
    k = rows.shape[1] // 2 if rows.dtype == torch.float64 else 0
    logprobs = rows[:, k:].float()
    ids = rows[:, :k].to(torch.int32).numpy().astype("<i4").tobytes()
    blob = HEADER.pack(k, batch.num_sampled) + ids + logprobs.numpy().astype("<f4").tobytes()
    # Impossible tokens have a logprob of -inf
    return EncodedScores(blob, not bool(logprobs.isnan().any()))

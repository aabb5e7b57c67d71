"""Reward model over packed tokens: a scalar head on a conversation's last token, as in Hugging Face's classifiers.

Invariant: parameter names, after the wrapper's prefix, are those of `AutoModelForSequenceClassification`.
"""

from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import model_input, packed_kwargs


class PackedRewardModel(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError unless the model scores by one linear layer on hidden states."""
        super().__init__()
        self.model = model
        if not isinstance(getattr(model, "score", None), nn.Linear) or model.config.num_labels != 1:
            raise ValueError(
                f"{type(model).__name__} has no linear `score` with one label: take a decoder with a head of "
                "Hugging Face's sequence classification, such as Qwen2, Qwen3, Llama or Mistral"
            )

    def forward(self, x: PackedInput) -> Tensor:
        """Return the logits after `x.positions`, [M] float32.

        Raises:
            ValueError: no image input.
        """
        if x.images:
            raise ValueError("the conversation has images, but a reward model has no image input")
        backbone = cast(nn.Module, self.model.base_model)
        hidden: Tensor = backbone(**model_input(x), **packed_kwargs(x.packing)).last_hidden_state[0]
        head = cast(Any, self.model).score
        return head(hidden.index_select(0, x.positions))[:, 0].float().clone()  # FSDP2 hooks into outputs: no views

    def write_config(self, folder: Path) -> None:
        """Write the classifier's `config.json` in place of the language model's."""
        self.model.config.architectures = [type(self.model).__name__]
        self.model.config.save_pretrained(folder)

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from offbeat.envs.config import Config

Pipeline = Literal["agentic", "online_dpo", "rlvr", "sft", "dpo", "distill", "reward_model"]
GROUP_SIZES: dict[str, int] = {"sft": 1, "dpo": 2, "distill": 1, "reward_model": 2}
"""Trajectories per row."""
PLAYING_PROMPTS = ("rlvr", "online_dpo")
"""Pipelines whose episodes may answer the prompts of `data`."""
TRAINING_EPISODES = ("agentic", *PLAYING_PROMPTS)


class DataConfig(Config):
    """Rows of a data pipeline or of `rlvr`, and their conversations."""

    dataset_name: Path
    """A .jsonl, .json, .csv or .parquet file, a folder of such files, a `datasets` folder, or a dataset of the hub:
    `ORGANIZATION/NAME[:CONFIG/SPLIT][@REVISION]`, without a split `train`.
    """
    val_dataset_name: Path | None = None
    """Validation rows, for evaluation by loss, or with `rlvr` by sampling; a hub's split is `test` unless given."""
    messages_key: str = "messages"
    """Column of chat messages, for `sft`, `distill` and `rlvr`; without it, `prompt_key` (and `response_key`)."""
    prompt_key: str = "prompt"
    """Column of a user's text, or of messages."""
    query_key: str | None = None
    """Column of a text that follows the prompt's on a new line unless empty, for `sft` and `distill` (Alpaca's `input`)."""
    system_key: str | None = None
    """Column of a system message before the prompt unless empty, for `sft` and `distill`."""
    response_key: str = "response"
    """Column of the assistant's text, or of messages."""
    chosen_key: str = "chosen"
    """Column of the preferred response, for `dpo` and `reward_model`: text, or messages, with their prompt unless
    `prompt_key` exists.
    """
    rejected_key: str = "rejected"
    margin_key: str = "margin"
    """Column of the margin by which the chosen reward should exceed the rejected one, for `reward_model`, if it exists."""
    images_key: str = "images"
    """Optional column of images for the parts `{"type": "image"}`: paths from the file's folder, data URLs, or bytes."""
    completion_key: str = "completion"
    """Column of a single response, for `dpo.loss_type: kto`: text, or messages."""
    label_key: str = "label"
    """Column that says whether `completion_key` is desirable."""
    tools_key: str = "tools"
    """Optional column of tools for the assistant: JSON schemas, as a list or JSON text."""
    tag_key: str = "tag"
    """Optional column of a row's tag, by which `teacher.NAME.tag_included` selects; else the pipeline's name. With
    `rlvr`: a tag of `custom_envs`, or a value that `tag_included` assigns to one.
    """
    ground_truth_key: str = "ground_truth"
    """Column of the right answer, for the rewards of `rlvr`; `column.field` for a column of mappings, as verl's
    `reward_model.ground_truth`.
    """
    prompt_length: Annotated[int | None, Field(ge=1)] = None
    """Maximum tokens of a prompt of `rlvr`; longer ones are replaced by the next and counted. None: what fits in
    `sequence_length`.
    """
    tag_included: dict[str, tuple[str, ...]] = Field(default_factory=dict[str, tuple[str, ...]])
    """Tag of `custom_envs` -> values of `tag_key`, for `rlvr`; empty: the tag itself. Other rows are excluded."""
    domain_interleave_probs: dict[str, float] = Field(default_factory=dict[str, float])
    """Tag of `custom_envs` -> share of groups, for `rlvr`, summing to 1; empty: as in the file."""
    train_on: Literal["all", "last", "completion"] = "all"
    """Tokens with a loss: of every assistant turn, of the last, or all from the first answer on, with the turns in
    between.
    """
    too_long: Literal["drop", "truncate"] = "drop"
    """Rows of more than `sequence_length` tokens: replaced by the next, or cut."""
    shuffle: bool = True
    """Order of rows: by `seed` in each epoch, or the file's."""
    num_train_epochs: Annotated[float | None, Field(gt=0)] = None
    """Passes over the rows, in place of `max_steps`."""

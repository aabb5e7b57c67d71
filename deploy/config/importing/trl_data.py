"""Datasets of TRL's configurations: of the hub, or files."""

from offbeat.deploy.config.hub_datasets import DATASET_ID, is_dataset_id
from offbeat.deploy.config.importing.report import Outcome
from offbeat.deploy.config.importing.rules import Key, Tree

TRAIN, TEST = "train", "test"
"""TRL's defaults of `dataset_train_split` and `dataset_test_split`."""
ONE_FILE = "save the split as a file of its own"


def take_dataset(key: Key) -> Outcome:
    """Take a dataset of the hub with its config and split, or a file."""
    if (name := _name_split(key.tree, TRAIN)) is None:
        note = "a file or a folder of `datasets`: `load_dataset(...).save_to_disk(...)`"
        return Outcome("renamed", ("data", "dataset_name"), key.value, note)
    return Outcome("renamed" if name == key.value else "value", ("data", "dataset_name"), name)


def take_part(key: Key) -> Outcome:
    """Take a config or split, which the dataset's name has here."""
    if _name_split(key.tree, TRAIN) is None:
        return Outcome("no counterpart", note=ONE_FILE)
    return Outcome("same", note="part of data.dataset_name")


def take_test_split(key: Key) -> Outcome:
    if _name_split(key.tree, TEST) is None:
        return Outcome("no counterpart", note=ONE_FILE)
    return Outcome("same", note="part of data.val_dataset_name")


def validation_name(source: Tree) -> str | None:
    """Return the validation rows of a dataset of the hub; None unless TRL evaluates."""
    is_evaluated = source.get("eval_strategy") not in (None, "no", False)
    return _name_split(source, TEST) if is_evaluated else None


def _name_split(source: Tree, default: str) -> str | None:
    """Return a split of the hub's dataset; None for a file or folder. default: split that the id need not name."""
    name, config = source.get("dataset_name"), source.get("dataset_config")
    if not isinstance(name, str) or not is_dataset_id(name) or ":" in name or "@" in name:
        return None
    split = str(source.get(f"dataset_{default}_split") or default)
    parts = [str(config)] if config else []
    whole = ":".join([name, "/".join(parts if split == default else [*parts, split])]).removesuffix(":")
    return whole if DATASET_ID.fullmatch(whole) else None

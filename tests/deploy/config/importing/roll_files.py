"""ROLL's example files, and what their import says of a key."""

from pathlib import Path
from typing import Any

import yaml

from offbeat.deploy.config.importing.report import KeyReport

FILES = Path(__file__).parent / "roll"
DPO = FILES / "dpo" / "qwen2.5-3B_dpo_megatron.yaml"
SFT = FILES / "sft" / "sft_config.yaml"
RLVR = FILES / "rlvr" / "rlvr_config.yaml"
DISTILL = FILES / "distill" / "distill_megatron.yaml"


def by_key(reports: list[KeyReport]) -> dict[str, KeyReport]:
    return {".".join(each.key): each for each in reports if each.key}


def write_changed(folder: Path, file: Path, changes: dict[str, Any]) -> Path:
    """Write a file with other values, None removing a key; keys are dotted."""
    source = yaml.safe_load(file.read_text())
    for name, value in changes.items():
        table = source
        *parents, leaf = name.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
        table.pop(leaf, None)
        if value is not None:
            table[leaf] = value
    (folder / file.name).write_text(yaml.safe_dump(source, sort_keys=False))
    return folder / file.name

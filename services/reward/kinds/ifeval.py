import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from offbeat.envs.optional_imports import require
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.kinds.config import IFEvalConfig
from offbeat.services.reward.kinds.ifeval_constraints import Args, ConstraintError, check_constraint
from offbeat.services.reward.sample import RewardSample, final_text

IDS, ARGS = "instruction_id_list", "kwargs"


class IFEval:
    def __init__(self, config: IFEvalConfig) -> None:
        """Raises ValueError without langdetect."""
        require("langdetect", "data")
        self._is_loose = config.mode == "loose"
        self._needs_all = config.reward == "all"

    def __call__(self, sample: RewardSample) -> float:
        constraints = read_constraints(sample)
        variants = _variants(final_text(sample.response)) if self._is_loose else [final_text(sample.response)]
        try:
            met = [any(check_constraint(name, text, args) for text in variants) for name, args in constraints]
        except ConstraintError as error:
            raise RewardError(Failure.BAD_ROW, str(error)) from error
        return float(all(met)) if self._needs_all else sum(met) / len(met)


def read_constraints(sample: RewardSample) -> list[tuple[str, Args]]:
    """Return names and arguments from the row, or from `ground_truth`; raises RewardError."""
    source = sample.row if sample.row.get(IDS) is not None else sample.ground_truth
    try:
        value: Any = json.loads(source) if isinstance(source, str) else source
        names, all_args = _list(value[IDS]), _list(value[ARGS])
        pairs = list(zip(names, all_args, strict=True))
        if not pairs or not all(isinstance(args, Mapping | None) for _, args in pairs):
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise RewardError(
            Failure.BAD_ROW, f"the row needs {IDS} and {ARGS}, lists of equal length, as columns or in ground_truth"
        ) from None
    # Tables fill the keys that other constraints have
    return [(str(name), {key: each for key, each in (args or {}).items() if each is not None}) for name, args in pairs]


def _list(value: Any) -> Sequence[Any]:
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, Sequence):
        raise TypeError
    return cast(Sequence[Any], value)


def _variants(text: str) -> list[str]:
    """Return the texts of the published loose accuracy."""
    lines = text.split("\n")
    parts = [lines, lines[1:], lines[:-1], lines[1:-1]]
    texts = ["\n".join(part).strip() for part in parts]
    return [*texts, *(each.replace("*", "") for each in texts)]

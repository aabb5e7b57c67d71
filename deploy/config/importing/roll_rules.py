"""Rules for the keys of ROLL's pipelines."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offbeat.deploy.config.importing.report import KeyPath, Outcome
from offbeat.deploy.config.importing.roll_agentic import AGENTIC, agentic_defaults
from offbeat.deploy.config.importing.roll_batches import batch_defaults
from offbeat.deploy.config.importing.roll_data import DPO, SFT, dpo_defaults, sft_defaults
from offbeat.deploy.config.importing.roll_distill import DISTILL, distill_defaults
from offbeat.deploy.config.importing.roll_keys import find_unknown
from offbeat.deploy.config.importing.roll_rlvr import RLVR, rlvr_defaults
from offbeat.deploy.config.importing.roll_roles import ENGINES, GENERATING, ROLES, SCORED, TRAINING
from offbeat.deploy.config.importing.roll_run import ALGORITHM, RUN, defaults
from offbeat.deploy.config.importing.rules import Key, Rules, Tree, apply, put

Defaults = Callable[[Tree], Iterator[tuple[str, str, Any]]]
COMMON: Rules = (*RUN, *ROLES, *ENGINES, *GENERATING)
PIPELINES: Mapping[str, tuple[Rules, tuple[Defaults, ...]]] = {
    "agentic": ((*SCORED, *AGENTIC, *ALGORITHM, *TRAINING, *COMMON), (agentic_defaults, batch_defaults, defaults)),
    "sft": ((*SFT, *TRAINING, *COMMON), (sft_defaults, defaults)),
    "rlvr": ((*SCORED, *RLVR, *ALGORITHM, *TRAINING, *COMMON), (rlvr_defaults, batch_defaults, defaults)),
    "distill": ((*DISTILL, *TRAINING, *COMMON), (distill_defaults, defaults)),
    "dpo": ((*DPO, *TRAINING, *COMMON), (dpo_defaults, defaults)),
}


def find_counterpart(path: KeyPath, value: object) -> Outcome | None:
    """Return what becomes of a single key that ROLL has, if a rule says so."""
    for pipeline, (rules, _) in PIPELINES.items():
        if find_unknown(pipeline, path) is None:
            tree: Tree = {}
            put(tree, path, value)
            if (outcome := apply(rules, Key(path, value, tree))) is not None:
                return outcome
    return None

import warnings
from typing import Any, cast

from torch import nn

from offbeat.trainer.config.actor_train import ActorTrainConfig
from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.engines.deepspeed import DeepSpeedEngine
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.policy import PackedPolicy


def make_engine(module: nn.Module, train: ActorTrainConfig, ranks: Ranks) -> TrainEngine[Any]:
    """Return the configured engine of a trained model.

    Raises:
        ValueError: the model can't be trained so.
    """
    strategy = train.strategy_args
    if strategy.strategy_name == "fsdp2_train":
        from offbeat.trainer.engines.fsdp2 import FSDP2Engine  # takes a second to import  # noqa: PLC0415

        sizes = {"tp_size": strategy.tp_size, "pp_size": strategy.pp_size, "ulysses_size": strategy.ulysses_size}
        return FSDP2Engine(module, train.training_args, ranks, **sizes)
    if strategy.strategy_name == "megatron_train":
        warnings.filterwarnings("ignore", module="megatron")  # it warns of each library that it does without
        from offbeat.trainer.engines.megatron import MegatronEngine  # of an extra  # noqa: PLC0415

        return MegatronEngine(cast(PackedPolicy, module), train.training_args, ranks)
    return DeepSpeedEngine(module, train.training_args, strategy, ranks)

"""Checks of the transport of weights against devices."""

from collections.abc import Iterator

from offbeat.deploy.config.device_plan import DevicePlan
from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue

KEY = "weights.transport"
QUANTIZATION = "quantization"


def check_transport(config: RunConfig, plan: DevicePlan, *, owns_engines: bool) -> Iterator[ConfigIssue]:
    """Yield a transport between GPUs that these do not allow. owns_engines: as in `plan_devices`."""
    transport, on_gpus = config.weights.transport, "cpu" not in (config.actor_infer.device, config.actor_train.device)
    if transport not in ("ipc", "nccl"):
        if config.uses_engine and owns_engines and (config.actor_infer.engine.model_extra or {}).get(QUANTIZATION):
            yield ConfigIssue(
                f"{ENGINE}.{QUANTIZATION}",
                f"weights by {transport} are compared with the file once loaded, which quantized ones differ from: leave it "
                f"out, or take {KEY} nccl, or ipc on the learner's GPU",
            )
        return
    if not on_gpus:
        yield ConfigIssue(KEY, f"{transport} transfers tensors between GPUs: on a CPU take shm, or fs across hosts")
    elif plan.issues or not owns_engines or config.control.learner != "managed":
        return
    elif transport == "nccl" and plan.is_shared:
        yield ConfigIssue(KEY, "nccl needs a GPU for each end, and an engine is on the learner's: take shm, or ipc")
    elif transport == "ipc" and not maps_weights(config, plan):
        yield ConfigIssue(
            KEY,
            "ipc maps weights within a GPU, for one engine and one learner's process, both on it: take shm, fs, or nccl "
            "where engines have GPUs of their own",
        )


def maps_weights(config: RunConfig, plan: DevicePlan) -> bool:
    """Return whether the run's one engine is on the one device of its learner."""
    processes = config.actor_train.num_processes + config.num_critic_processes
    is_single = processes == config.actor_infer.engine.world_size == len(plan.engines) == 1
    return is_single and plan.engines[0].is_shared

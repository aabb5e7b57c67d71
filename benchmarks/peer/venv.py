"""TRL's venv: its pins conflict with vLLM's."""

from offbeat.benchmarks.harness.venv import GuestVenv

TRL_VENV = GuestVenv(
    "peer",
    "TRL",
    (
        "trl==1.16.0",
        "torch==2.13.0",
        "transformers==5.19.0",
        "accelerate==1.15.0",
        "datasets==5.2.0",
        "gymnasium==1.4.0",
        "numpy==2.4.6",
        "pydantic==2.14.3",
    ),
)

"""Rewards of responses: functions, judges and models, apart from the env workers that ask for them."""

"""Rewards of responses: functions, judges and models."""

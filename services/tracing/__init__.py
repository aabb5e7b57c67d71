"""Traces of groups by OpenTelemetry, from the prompt to the gradient."""

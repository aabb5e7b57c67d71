"""Run configuration: schema, loading and checks."""

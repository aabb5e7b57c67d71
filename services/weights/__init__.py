"""The weight-sync broker: names versions, moves bytes, brings late replicas up to date."""

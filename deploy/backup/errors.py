"""Errors of backups."""


class BackupError(Exception):
    """Run that can't be backed up or restored."""

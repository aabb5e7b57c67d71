"""Env runners: in process, in a thread, or in a child process."""

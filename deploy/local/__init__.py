"""The mesh of one command on this machine."""

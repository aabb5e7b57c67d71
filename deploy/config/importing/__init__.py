"""Other libraries' configurations as Offbeat's, with a report of every key."""

"""Import of other libraries' configurations, with a report of every key."""

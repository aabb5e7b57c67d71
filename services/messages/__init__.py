"""Messages between services, and their msgpack encoding."""

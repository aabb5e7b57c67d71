"""Redis connections, servers, errors and leases."""

"""Many replicas in simulated time."""

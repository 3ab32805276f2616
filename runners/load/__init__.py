"""From an artifact's folder to programs, weights and state on the devices."""

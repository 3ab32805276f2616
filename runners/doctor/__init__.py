"""What a machine is, against what an artifact wants of it."""

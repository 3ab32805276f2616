"""What a machine makes of an artifact's programs: how far they are from the expectations, and how long they take."""

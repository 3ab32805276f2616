"""A plan with what it would cost."""

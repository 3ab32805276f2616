"""What an artifact holds, as text."""

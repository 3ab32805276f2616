"""What an artifact holds, as text and as a page."""

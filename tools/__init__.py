"""Tools of the project itself, such as those that made and examined the demo checkpoint. Not installed."""

"""Tools of the project itself: how the packaged demo checkpoint was made and examined. Not installed."""

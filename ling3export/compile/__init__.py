"""From a plan to compiled cells and a finished artifact."""

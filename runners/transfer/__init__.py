"""One sequence's state on its way to another process: the stores that carry it, and the connector."""

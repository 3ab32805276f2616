"""One sequence's state on its way to another process: objects, the backends that carry them, and the connector."""

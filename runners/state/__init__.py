"""What sequences leave behind for others: the prefix cache."""

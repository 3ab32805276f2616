"""Workers in a Ray cluster, each on a node of its own or beside others, and the work that they share."""

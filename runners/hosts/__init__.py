"""Several hosts that run one target together: how they meet, and the channel between them."""

"""Answers to a file of requests, in shards that need no connection with each other."""

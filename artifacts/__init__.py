"""The artifact on disk: manifest, weight store, digests. Knows no jax."""

"""The catalogue: artifacts published under names and versions, in OCI image layouts."""

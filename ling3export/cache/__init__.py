"""The build cache: compiled cells by the content they were made from."""

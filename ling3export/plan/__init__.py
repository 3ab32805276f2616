"""The plan of a build: targets, paddings, pool sizes and options; and what `plan` says that it takes."""

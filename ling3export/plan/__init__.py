"""What a build is to make: targets, paddings, pool sizes and options; and what `plan` says that it takes."""

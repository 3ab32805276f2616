"""What a build is to make: targets, paddings, pool sizes and options."""

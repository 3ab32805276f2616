"""An artifact as a model of other evaluation libraries."""

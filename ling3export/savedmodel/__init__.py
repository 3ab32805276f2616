"""Export to TensorFlow's SavedModel format."""

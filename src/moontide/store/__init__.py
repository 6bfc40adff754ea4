"""Features and predictions on disk."""

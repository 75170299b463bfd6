"""One model, many callers."""

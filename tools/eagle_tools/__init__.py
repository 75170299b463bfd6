"""Look on: benchmarks, checks, demo. Nothing imports this package."""

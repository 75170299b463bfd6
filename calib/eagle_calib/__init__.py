"""Measure: ranges of the float graph over calibration text."""

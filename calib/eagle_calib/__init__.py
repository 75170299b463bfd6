"""Measure: what the linear layers of the float graphs are fed, over calibration text and drafted trees."""

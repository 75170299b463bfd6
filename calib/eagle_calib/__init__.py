"""Calibration: records the inputs of the linear layers of an fp32 bundle, on text and on drafted trees."""

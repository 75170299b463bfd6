"""Predicts what decoding takes on an NVIDIA card, and checks a card with a kit."""

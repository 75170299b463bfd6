"""Learn: EAGLE heads for a frozen target."""

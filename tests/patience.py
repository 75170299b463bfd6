"""How long tests wait for what takes no time: so long that a busy or slow machine fails none of them."""

PATIENCE_S = 240.0  # seconds after which something counts as never happening; nothing is measured with it

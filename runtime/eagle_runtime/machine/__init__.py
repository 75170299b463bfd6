"""The machine at hand: processor, memory, graphics card, and the user's cache folder."""

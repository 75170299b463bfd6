"""What proposes the tree that the target verifies."""

"""Other engines that run the same weights: conversions to their formats, and processes that decode with them."""

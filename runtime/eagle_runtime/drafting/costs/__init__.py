"""What forward passes cost, which trees are sized by."""

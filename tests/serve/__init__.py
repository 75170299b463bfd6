"""The HTTP server: requests, answers, the queue, security, the chat page."""

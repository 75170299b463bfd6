"""eagle-chat: a conversation in a terminal."""

"""Outputs that follow a JSON schema, a regular expression or a grammar: what is asked for, and what it allows."""

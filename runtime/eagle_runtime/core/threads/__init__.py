"""Calls of one model from several threads, and signals that stop a program."""

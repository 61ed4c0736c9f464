"""Runs: execute, resume, verify, plan, and read what was saved."""

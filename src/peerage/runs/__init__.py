"""Runs: run, resume, verify and plan them, and load saved models."""

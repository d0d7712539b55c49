"""Verification and timing, in a child process."""

"""Strategies: what to try next."""

"""Epilogues: each formula is one device function."""

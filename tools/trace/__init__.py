"""Timelines as Perfetto JSON and as pictures."""

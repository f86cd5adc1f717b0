"""Bring-up: a ladder from the driver to the rack, one rung at a time, and the report of where it stops."""

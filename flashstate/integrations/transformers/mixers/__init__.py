"""Kinds of mixers: each runs the mixers of one recurrence, whatever model they are in."""

"""Commands for those who work on the library; no part of it."""

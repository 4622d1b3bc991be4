"""What a stored state is: its formats, its rounding, and where its slots are."""

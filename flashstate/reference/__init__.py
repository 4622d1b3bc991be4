"""The equations, in plain torch: they define every result and are what runs on a CPU."""

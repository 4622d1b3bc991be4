"""The engines: device code only. Importing a module here imports triton; ops/ does so when a kernel is first needed."""

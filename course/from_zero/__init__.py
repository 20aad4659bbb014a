"""From zero: write the engine yourself. README.md says how."""
